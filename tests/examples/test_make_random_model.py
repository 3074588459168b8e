"""examples/make_random_model.py: a checkpoint of the named shape that transformers loads and the trainer streams."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.config import StreamConfig
from megatrain_rl.trainer import StreamTrainer

SCRIPT = Path(__file__).parents[2] / "examples" / "make_random_model.py"


def make(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "tiny"
    done = make("tiny", folder, "--layers", 2, "--seed", 5)
    assert done.returncode == 0, done.stderr
    assert "tiny, 2 layers" in done.stdout
    return folder


def test_transformers_loads_it_and_the_trainer_streams_it(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.dtype == torch.bfloat16 and model.config.num_hidden_layers == 2
    assert model.config.tie_word_embeddings and model.config.architectures == ["Qwen2ForCausalLM"]
    wide = model.model.layers[1].mlp.up_proj.weight.float()
    assert wide.std().item() == pytest.approx(model.config.initializer_range, rel=0.05) and abs(wide.mean()) < 1e-3
    layer = model.model.layers[0]
    assert not layer.self_attn.q_proj.bias.any() and (layer.input_layernorm.weight == 1).all()
    assert not torch.equal(layer.mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)
    trainer = StreamTrainer.from_pretrained(checkpoint, config=StreamConfig(), adamw=None, device="cpu")
    weights = dict(trainer.named_parameters())
    assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"], model.model.layers[1].mlp.up_proj.weight)
    trainer.close()


def test_tokenizer_has_as_many_tokens_as_the_model(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert len(tokenizer) == shape_config("tiny").vocab_size
    ids = tokenizer("héllo 12").input_ids
    assert len(ids) == len("héllo 12".encode()) and tokenizer.decode(ids) == "héllo 12"
    assert tokenizer.decode([len(tokenizer) - 1]) != ""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id


def test_seed_decides_the_numbers(checkpoint, tmp_path):
    assert make("tiny", tmp_path / "same", "--layers", 2, "--seed", 5).returncode == 0
    assert make("tiny", tmp_path / "other", "--layers", 2, "--seed", 6).returncode == 0
    ours, same, other = (
        load_file(next(f.glob("*.safetensors"))) for f in (checkpoint, tmp_path / "same", tmp_path / "other")
    )
    assert all(torch.equal(ours[n], same[n]) for n in ours)
    assert not torch.equal(ours["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_bad_input_is_named_and_nothing_is_written(checkpoint, tmp_path):
    unknown = make("qwen9-1b", tmp_path / "x")
    assert unknown.returncode == 2 and "shape qwen9-1b: " in unknown.stderr and "tiny" in unknown.stderr
    assert not (tmp_path / "x").exists()
    taken = make("tiny", checkpoint)
    assert taken.returncode == 2 and f"{checkpoint} exists already" in taken.stderr
    assert "qwen2.5-7b" in make("--list").stdout.splitlines()
