"""A model's folder is what transformers would load from it, or it is refused with the file or setting to change."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain_rl.batch import pack_sequences
from megatrain_rl.config import StreamConfig
from megatrain_rl.model.hf_io import CheckpointReader
from megatrain_rl.trainer import StreamTrainer

WEIGHTS = "model.safetensors"
Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path):
    return tiny.saved(tiny.model(tiny.config(layers=2)), tmp_path / "model")


def tied_folder(tmp_path: Path) -> Path:
    return tiny.saved(tiny.model(tiny.config(layers=2, tied=True)), tmp_path / "tied")


def edit(folder: Path, change: Callable[[Weights], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def set_config(folder: Path, **settings) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def build(folder: Path) -> StreamTrainer:
    return StreamTrainer.from_pretrained(
        folder, config=StreamConfig(pack_tokens=48, cpu_threads=1, **tiny.FP32), adamw=None, device="cpu"
    )


def assert_loaded_as_by_transformers(folder: Path) -> None:
    tokens = tiny.sequences([20])[0]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens[None]).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    trainer = build(folder)
    [stats] = trainer.log_probs(pack_sequences([tokens], max_tokens=48))
    torch.testing.assert_close(stats.log_probs_T[:-1], wanted, rtol=0, atol=2e-5)
    trainer.close()


def extra_tensors(tensors: Weights) -> None:
    tensors["model.layers.7.self_attn.q_proj.weight"] = torch.randn(4, 4)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.randn(4)


def to(dtype: torch.dtype) -> Callable[[Weights], None]:
    return lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_files_of_another_float_dtype(folder, dtype):
    edit(folder, to(dtype))
    assert_loaded_as_by_transformers(folder)


def test_tensors_without_a_place_are_told(folder, caplog):
    edit(folder, extra_tensors)
    assert_loaded_as_by_transformers(folder)
    assert "layers.7" in caplog.text and "inv_freq" not in caplog.text


def test_a_tied_matrix_may_be_there_twice(tmp_path):
    folder = tied_folder(tmp_path)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_loaded_as_by_transformers(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_bias": True}, {"rope_theta": 500.0, "rope_parameters": None}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-2},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": None},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": None},
    ],
    ids=lambda s: next(iter(s)),
)  # fmt: skip
def test_settings_that_change_the_arithmetic(folder, settings):
    set_config(folder, **settings)
    assert_loaded_as_by_transformers(folder)


def drop_head(tensors: Weights) -> None:
    del tensors["lm_head.weight"]


def another_head(tensors: Weights) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 0.01


def scales(name: str) -> Callable[[Weights], None]:
    return lambda tensors: tensors.update({f"model.layers.0.mlp.up_proj.{name}": torch.ones(1)})


def quantized(dtype: torch.dtype) -> Callable[[Weights], None]:
    def change(tensors: Weights) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].clamp(-1, 1).to(dtype)

    return change


def put(value: float, name: str = "model.norm.weight") -> Callable[[Weights], None]:
    return lambda tensors: tensors[name].view(-1)[3:4].fill_(value)


def add(name: str) -> Callable[[Weights], None]:
    return lambda tensors: tensors.update({name: torch.ones(2)})


@pytest.mark.parametrize(
    "change, message",
    [
        (drop_head, r"lm_head\.weight"),
        (scales("weight_scale_inv"), "weight_scale_inv.*quantiz"), (scales("weight_scale"), "weight_scale.*quantiz"),
        (scales("qweight"), "qweight.*quantiz"), (scales("weight_packed"), "weight_packed.*quantiz"),
        (scales("weight.absmax"), "absmax.*quantiz"),
        (quantized(torch.float8_e4m3fn), "up_proj.*F8_E4M3.*quantiz"), (quantized(torch.int8), "up_proj.*I8.*quantiz"),
        (put(float("nan")), r"model\.safetensors.*model\.norm\.weight.*NaN"), (put(float("inf")), "infinite"),
        (put(-float("inf"), "lm_head.weight"), r"lm_head\.weight.*infinite"),
        (put(3.4e38), r"model\.norm\.weight.*beyond"), (put(-3.4e38), r"model\.norm\.weight.*beyond"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model\.norm\.weight.*shape"),
        (add("model.layers.1.self_attn.o_proj.bias"), r"o_proj\.bias.*config\.json"),
        (add("model.layers.0.self_attn.q_norm.weight"), r"q_norm\.weight.*config\.json"),
        (add("model.norm.bias"), r"model\.norm\.bias"), (add("lm_head.bias"), r"lm_head\.bias"),
        (lambda t: [t.update({n.removeprefix("model."): t.pop(n)}) for n in list(t)], "no tensor"),
    ],
)  # fmt: skip
def test_weights_that_are_refused(folder, change, message):
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        build(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization_config": {"quant_method": "fp8"}}, {"compression_config": {"quant_method": "compressed-tensors"}},
    ],
    ids=["fp8", "compressed"],
)  # fmt: skip
def test_a_config_of_quantized_weights_is_refused(folder, settings):
    set_config(folder, **settings)
    with pytest.raises(ValueError, match=r"config\.json.*(fp8|compressed).*dequantize"):
        build(folder)


def test_a_config_of_quantized_weights_in_place_of_the_folder_s_is_refused(folder):
    config = tiny.config(layers=2)
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"hf_config.*fp8.*dequantize"):
        StreamTrainer.from_pretrained(
            folder, config=StreamConfig(pack_tokens=48), adamw=None, device="cpu", hf_config=config
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": "two"}, {"rope_parameters": 3}, {"hidden_act": 5}, {"hidden_size": None}, {"model_type": ["qwen2"]},
        {"num_attention_heads": 0}, {"vocab_size": -5}, {"layer_types": "full"},
    ],
    ids=lambda s: next(iter(s)),
)  # fmt: skip
def test_a_config_of_other_kinds_is_one_clear_error(folder, settings):
    set_config(folder, **settings)
    with pytest.raises(ValueError, match=r"config\.json"):
        build(folder)


def test_an_adapter_is_refused(folder):
    """transformers would load its base model and put the adapter on it."""
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(ValueError, match=r"adapter_config\.json.*merge"):
        build(folder)


def test_weights_under_another_name_are_refused(folder):
    set_config(folder, transformers_weights="other.safetensors")
    with pytest.raises(ValueError, match=r"transformers_weights='other\.safetensors'"):
        build(folder)


def test_a_tied_model_with_another_output_matrix_is_refused(tmp_path):
    """transformers would load two matrices there, and a rollout engine that follows config.json one."""
    folder = tied_folder(tmp_path)
    edit(folder, another_head)
    with pytest.raises(ValueError, match="tie_word_embeddings=false"):
        build(folder)
    set_config(folder, tie_word_embeddings=False)
    assert_loaded_as_by_transformers(folder)


def shards(folder: Path) -> list[Path]:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
    (folder / WEIGHTS).unlink()
    return sorted(folder.glob("model-*.safetensors"))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    "damage", [cut, lambda f: f.write_bytes(b"\x01"), lambda f: f.write_bytes(b""), lambda f: f.unlink()]
)
@pytest.mark.parametrize("what", ["shard", "model.safetensors.index.json", "config.json", WEIGHTS])
def test_a_damaged_file_is_named(folder, what, damage):
    if what == WEIGHTS:
        file = folder / WEIGHTS
    else:
        split = shards(folder)
        file = split[1] if what == "shard" else folder / what
    damage(file)
    with pytest.raises(ValueError, match=file.name.replace(".", r"\.")):
        build(folder)


def test_an_index_that_names_a_tensor_elsewhere(folder):
    first, second, *_ = shards(folder)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = next(n for n, f in index["weight_map"].items() if f == first.name)
    index["weight_map"][name] = second.name
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{second.name}.*{name}"):
        CheckpointReader(folder)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json.*weight_map"):
        CheckpointReader(folder)


def test_a_file_beside_shards_is_refused(folder):
    """transformers loads the one file there, and vLLM what the index names."""
    whole = (folder / WEIGHTS).read_bytes()
    shards(folder)
    (folder / WEIGHTS).write_bytes(whole)
    with pytest.raises(ValueError, match=r"model\.safetensors and .*index\.json.*take out"):
        build(folder)
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()
    index = {"weight_map": dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_loaded_as_by_transformers(folder)


def test_a_tensor_in_two_shards(folder):
    """The same twice is one; two values would be one or the other, by who reads."""
    first, second, *_ = shards(folder)
    name = next(iter(load_file(first)))
    held = load_file(first)[name]
    for value, fine in ((held, True), (held + 1, False)):
        save_file(load_file(second) | {name: value}, second, metadata={"format": "pt"})
        if fine:
            assert_loaded_as_by_transformers(folder)
        else:
            with pytest.raises(ValueError, match=f"{name}.*{second.name}.*{first.name}"):
                build(folder)


def test_a_tensor_that_the_index_forgot_is_read(folder):
    shards(folder)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"]["model.norm.weight"]
    file.write_text(json.dumps(index))
    assert_loaded_as_by_transformers(folder)
