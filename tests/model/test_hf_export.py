"""A written folder has the tokenizer that was used, and a config that transformers 4 and 5 understand alike."""

import json
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
import verl_cases
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from megatrain_rl.model.hf_export import Companions, write_checkpoint

SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip


def write(directory, config, companions=None):
    write_checkpoint(directory, config, [("w", torch.zeros(2, dtype=torch.bfloat16))], companions or Companions())
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 5e5, **SCALED}], ids=["theta", "scaled"]
)
def test_settings_under_the_names_of_transformers_4(tmp_path, rope):
    """transformers 4 does not know rope_parameters: without rope_theta it would take 10,000."""
    config = tiny.config("llama", rope_parameters=rope)
    written = write(tmp_path / "m", config)
    assert written["rope_theta"] == rope["rope_theta"]
    assert written["rope_scaling"] == (SCALED if "factor" in rope else None)
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    again = AutoConfig.from_pretrained(tmp_path / "m")
    assert again.rope_parameters == config.rope_parameters and again.dtype == torch.bfloat16


def test_nothing_of_how_weights_were_stored_is_exported(tmp_path):
    config = tiny.config()
    config.quantization_config = {"quant_method": "fp8"}
    assert not {"quantization_config", "_attn_implementation"} & write(tmp_path / "m", config).keys()


def test_files_of_the_models_folder_are_copied(tmp_path):
    source = tmp_path / "source"
    names = [
        "tokenizer.json",
        "tokenizer.model",
        "spiece.model",
        "merges.txt",
        "chat_template.jinja",
        "generation_config.json",
        "qwen.tiktoken",
    ]
    (source / "additional_chat_templates").mkdir(parents=True)
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    for name in (*names, "pytorch_model.bin", "optimizer.pt"):
        (source / name).write_text(name)
    write(tmp_path / "m", tiny.config(), Companions.read(source))
    there = {str(f.relative_to(tmp_path / "m")) for f in (tmp_path / "m").rglob("*") if f.is_file()}
    assert there == {*names, "additional_chat_templates/tool_use.jinja", "config.json", "model.safetensors"}


def test_files_are_read_when_the_model_is(tmp_path, caplog):
    """The folder may be gone when a checkpoint is written, and a link to nothing is told at the start."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("kept")
    (source / "tokenizer.model").symlink_to(tmp_path / "nowhere")
    companions = Companions.read(source)
    shutil.rmtree(source)
    assert "tokenizer.model" in caplog.text
    write(tmp_path / "m", tiny.config(), companions)
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "kept"


def test_the_tokenizer_that_was_used_takes_the_place_of_the_models(tmp_path):
    source = verl_cases.save_tiny_model(str(tmp_path / "source"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (tmp_path / "source" / "chat_template.jinja").write_text("another")
    generation = GenerationConfig(eos_token_id=7, max_new_tokens=3)
    companions = replace(Companions.read(tmp_path / "source"), tokenizer=tokenizer, generation_config=generation)
    write(tmp_path / "m", tiny.config(), companions)
    again = AutoTokenizer.from_pretrained(tmp_path / "m")
    messages = [{"role": "user", "content": "ab"}]
    assert again.apply_chat_template(messages, tokenize=False) == "<user>ab"
    assert again.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)
    assert GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id == 7
