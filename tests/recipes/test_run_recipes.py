"""run_*.sh: what is missing is one clear line; what they ask of VERL composes, is accepted and fits their cards."""

import os
import subprocess
from pathlib import Path

import pytest
from verl_cases import write_prompts

RECIPES = Path(__file__).parents[2] / "recipes"
GB = 10**9
# recipe: shape, card, its weights' bytes in vLLM
RUNS = {
    "run_qwen2_5_7b_grpo.sh": ("qwen2.5-7b", 80 * GB, 15.2),
    "run_qwen3_32b_grpo.sh": ("qwen3-32b", 80 * GB, 34),
    "run_qwen2_5_1_5b_grpo.sh": ("qwen2.5-1.5b", 24 * GB, 3.1),
}


@pytest.fixture
def inputs(tmp_path) -> dict[str, str]:
    """Model, data and an interpreter that writes down what it was asked to run."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for split in ("train", "test"):
        write_prompts(tmp_path / f"{split}.parquet", 64)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nprintf "%s\\n" "$@" > "$0.asked"\n')
    python.chmod(0o755)
    return {
        "MODEL_PATH": str(tmp_path / "model"),
        "TRAIN_FILE": str(tmp_path / "train.parquet"),
        "VAL_FILE": str(tmp_path / "test.parquet"),
        "PYTHON": str(python),
        "OUTPUT_DIR": str(tmp_path / "out"),
    }


def start(recipe: str, environment: dict[str, str], *overrides: str) -> subprocess.CompletedProcess:
    kept = {
        k: v for k, v in os.environ.items() if k not in ("MODEL_PATH", "TRAIN_FILE", "VAL_FILE", "LOGGER", "OUTPUT_DIR")
    }
    return subprocess.run(
        ["bash", str(RECIPES / recipe), *overrides],
        env=kept | environment, cwd=RECIPES.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def asked(inputs: dict[str, str]) -> list[str]:
    lines = Path(inputs["PYTHON"] + ".asked").read_text().splitlines()
    assert lines[:2] == ["-m", "verl.trainer.main_ppo"]
    return lines[2:]


@pytest.mark.parametrize("recipe", RUNS)
@pytest.mark.parametrize(
    "wrong, expected",
    [
        ({"MODEL_PATH": "/no/such/model"}, ["/no/such/model", "MODEL_PATH"]),
        ({"MODEL_PATH": "models/a/b"}, ["MODEL_PATH='models/a/b'"]),
        ({"MODEL_PATH": "recipes/records"}, ["config.json", "recipes/records"]),
        ({"TRAIN_FILE": "/no/train.parquet"}, ["/no/train.parquet", "python examples/prepare_gsm8k.py"]),
        ({"VAL_FILE": "/no/test.parquet"}, ["/no/test.parquet"]),
        ({"PYTHON": "/bin/false"}, ["/bin/false", "megatrain_rl", "verl", "vllm"]),
    ],
)
def test_missing_input_is_one_line(inputs, recipe, wrong, expected):
    """The line begins with the recipe and names the input, and what to set or run."""
    done = start(recipe, inputs | wrong)
    assert done.returncode == 1 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{recipe}: ") and all(part in line for part in expected)
    assert not Path(inputs["OUTPUT_DIR"]).exists()


def test_a_hub_name_that_is_none_is_told_before_anything_starts(inputs):
    python = Path(inputs["PYTHON"])
    python.write_text('#!/bin/sh\n[ "$#" = 2 ] && exit 0\n[ "$1" = -c ] && exit 1\ntouch "$0.started"\n')
    done = start("run_qwen2_5_7b_grpo.sh", inputs | {"MODEL_PATH": "organisation/no-such-model"})
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and "organisation/no-such-model" in line and "hub" in line
    assert not Path(f"{python}.started").exists()


def test_a_folder_below_this_one_is_a_model(inputs, tmp_path):
    """The recipes' headers write such a path."""
    below = os.path.relpath(tmp_path / "model", RECIPES.parent)
    assert start("run_qwen2_5_7b_grpo.sh", inputs | {"MODEL_PATH": below}).returncode == 0
    assert f"actor_rollout_ref.model.path={below}" in asked(inputs)


def test_metrics_of_an_earlier_run_are_kept(inputs):
    """VERL's logger would empty the file."""
    out = Path(inputs["OUTPUT_DIR"])
    out.mkdir()
    (out / "metrics.jsonl").write_text("earlier\n")
    assert start("run_qwen2_5_7b_grpo.sh", inputs).returncode == 0
    [kept] = out.glob("metrics.*.jsonl")
    assert kept.read_text() == "earlier\n" and not (out / "metrics.jsonl").exists()


@pytest.mark.parametrize("recipe", RUNS)
def test_settings_compose_and_fit_the_card(inputs, recipe, monkeypatch):
    pytest.importorskip("verl")
    import torch
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from megatrain_rl.bench.shapes import shape_config
    from megatrain_rl.config import AdamWConfig, StreamConfig
    from megatrain_rl.model.decoder import decoder_spec
    from megatrain_rl.planner import make_plan
    from megatrain_rl.verl_plugin.driver import gpu_share

    shape, card, weights = RUNS[recipe]
    monkeypatch.setattr(gpu_share, "visible_card", lambda: gpu_share.Card(total_bytes=card, free_bytes=card - GB // 2))
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = start(recipe, inputs | {"LOGGER": "console,wandb"}, "data.train_batch_size=64", "+trainer.note=a b")
    assert done.returncode == 0, done.stderr
    overrides = asked(inputs)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    assert config.data.train_batch_size == 64 and config.trainer.note == "a b"
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 32 and config.actor_rollout_ref.rollout.n == 8
    assert list(config.trainer.logger) == ["file", "console", "wandb"]
    validate_config(config, use_reference_policy=False, use_critic=False)
    roles = config.actor_rollout_ref
    rollout = omega_conf_to_dataclass(roles.rollout)
    assert rollout.max_model_len == 1536
    assert not rollout.free_cache_engine and not rollout.enable_sleep_mode
    assert rollout.gpu_memory_utilization * card > (weights + 8) * GB
    assert (
        rollout.gpu_memory_utilization * card
        + roles.actor.megatrain.gpu_budget_gb * GB
        + gpu_share.reserve_bytes(config)
        <= card
    )
    spec = decoder_spec(shape_config(shape))
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    largest = max(slot.numel for block in spec.blocks for slot in block.layout.slots.values()) * torch.bfloat16.itemsize
    assert largest <= bucket < largest + 150e6
    stream = StreamConfig(gpu_budget_gb=roles.actor.megatrain.gpu_budget_gb, host_budget_gb=600)
    plan = make_plan(spec, stream, AdamWConfig(), reference=False)
    assert plan.idle_bytes + bucket <= plan.gpu_cap_bytes
