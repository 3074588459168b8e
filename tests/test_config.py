"""Settings are validated once; the error for an unknown one names the nearest known one."""

import dataclasses
import re

import pytest
import tiny
import torch

from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.model.decoder import decoder_spec
from megatrain_rl.planner import make_plan
from megatrain_rl.trainer import StreamTrainer


def test_misspelt_setting_names_the_nearest():
    with pytest.raises(ValueError, match=r"actor\.megatrain\.rng_depth.*actor\.megatrain\.ring_depth"):
        StreamConfig.from_mapping({"rng_depth": 3}, prefix="actor.megatrain.")


@pytest.mark.parametrize(
    "knob, value",
    [
        ("gpu_budget_gb", 0), ("checkpoint_interval", 0), ("num_grad_slabs", 0), ("ring_depth", 0), ("ring_depth", 1.5),
        ("pack_tokens", 0), ("optimizer", "sgd"), ("param_dtype", "float16"), ("grad_dtype", "fp8"), ("attention", "eager"),
        ("reference", "disk"), ("optimizer_state_dtype", "float16"), ("overlap_optimizer", "no"), ("overlap_optimizer", 1), ("cpu_threads", 0), ("cpu_threads", 1.5), ("pack_tokens", 1.5), ("pack_tokens", "48"), ("gpu_budget_gb", "9"), ("compile", "no"), ("ring_depth", True), ("host_budget_gb", -1),
    ],
)  # fmt: skip
def test_bad_value_names_the_setting(knob, value):
    with pytest.raises(ValueError, match=f"^{knob}="):
        StreamConfig(**{knob: value})


@pytest.mark.parametrize(
    "knob, value", [("lr", -1), ("betas", (0.9, 1.0)), ("eps", 0.0), ("weight_decay", -0.1), ("clip_grad", -1.0)]
)
def test_bad_adamw_value(knob, value):
    with pytest.raises(ValueError, match=f"^{knob}="):
        AdamWConfig(**{knob: value})


@pytest.mark.parametrize("knob", ["param_dtype", "grad_dtype", "optimizer_state_dtype"])
def test_short_names_of_dtypes(knob):
    for short, name, dtype in (("bf16", "bfloat16", torch.bfloat16), ("fp32", "float32", torch.float32)):
        config = StreamConfig(**{knob: short})
        assert config == StreamConfig(**{knob: name})
        resolved = knob.replace("_dtype", "_torch_dtype")
        assert getattr(config, knob) == name and getattr(config, resolved) == dtype
    for bad in ("fp16", "BF16", 16, None):
        with pytest.raises(ValueError, match=f"^{knob}="):
            StreamConfig(**{knob: bad})


@pytest.mark.parametrize("knob", ["param_dtype", "grad_dtype", "optimizer_state_dtype"])
def test_a_list_for_a_dtype_is_refused_like_any_bad_value(knob):
    """YAML makes lists easily, and a list cannot be looked up."""
    with pytest.raises(ValueError, match=f"^{knob}="):
        StreamConfig(**{knob: ["bf16"]})


@pytest.mark.parametrize("optimizer", ["torch", "deepspeed"])
def test_bf16_moments_need_the_native_optimizer(optimizer):
    for short in ("bf16", "bfloat16"):
        with pytest.raises(ValueError, match=rf"^optimizer_state_dtype=.*optimizer={optimizer}.*optimizer=native"):
            StreamConfig(optimizer=optimizer, optimizer_state_dtype=short)
    StreamConfig(optimizer=optimizer, optimizer_state_dtype="fp32")


def test_host_plan_counts_the_moments():
    """Bytes a parameter: weight, residual, gradient and both moments."""
    spec = decoder_spec(tiny.config(layers=4))

    def planned(**knobs):
        config = StreamConfig(host_budget_gb=8, **knobs)
        return make_plan(spec, config, AdamWConfig(), reference=False).host_bytes / spec.num_parameters

    assert planned() == 14
    assert planned(optimizer_state_dtype="bf16") == 10
    assert planned(optimizer_state_dtype="bf16", param_dtype="fp32", grad_dtype="fp32") == 12


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StreamConfig().ring_depth = 3


def test_unknown_model_type():
    config = tiny.config()
    config.model_type = "mamba9"
    with pytest.raises(ValueError, match=r"model_type='mamba9'.*llama"):
        decoder_spec(config)


def test_dropout_is_refused():
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        decoder_spec(tiny.config(attention_dropout=0.1))


def test_attention_that_cannot_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"attention=varlen.*CUDA"):
        tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path), attention="varlen")


def load(directory):
    return StreamTrainer.from_pretrained(directory, config=StreamConfig(), adamw=AdamWConfig(), device="cpu")


def test_missing_model_files_are_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json"):
        load(tmp_path)
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path / "model")
    (directory / "model.safetensors").rename(directory / "elsewhere")
    with pytest.raises(ValueError, match=r"model\.safetensors.*model\.safetensors\.index\.json"):
        load(directory)


def test_missing_shard_and_tensor(tmp_path):
    directory = tmp_path / "model"
    tiny.model(tiny.config()).save_pretrained(directory, max_shard_size="100KB")
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) > 2
    trainer = load(directory)
    trainer.close()
    shards[1].unlink()
    with pytest.raises(ValueError, match=re.escape(shards[1].name)):
        load(directory)


def test_config_that_does_not_match_the_weights(tmp_path):
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path)
    tiny.config(intermediate_size=96).save_pretrained(directory)
    with pytest.raises(ValueError, match=r"gate_proj\.weight.*\(160, 64\).*\(96, 64\)"):
        load(directory)
