"""A run of another strategy is the same with the plug-in installed and without: VERL's FSDP2 engine, twice, on the CPU."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from test_grpo_e2e import Run, grpo, workspace

__all__ = ["workspace"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

OTHER = [
    "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.ref.strategy=fsdp2", "critic.strategy=fsdp2",
    "actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.model.use_remove_padding=false",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.seed=1", "trainer.logger=[console,file]", "trainer.total_training_steps=2",
    "trainer.save_freq=-1", "trainer.resume_mode=disable", "actor_rollout_ref.actor.data_loader_seed=1",
]  # fmt: skip


def run(workspace: Path, name: str, plugins: str) -> Run:
    """plugins: which entry points VERL loads. Both runs have what the CPU needs."""
    here = Path(__file__).parent
    return grpo(
        workspace, name, *OTHER, f"trainer.default_local_dir={workspace}/ckpt-{name}",
        VERL_USE_EXTERNAL_PLUGINS=plugins, VERL_USE_EXTERNAL_MODULES="cpu_abilities", VERL_ENGINE_DEVICE="cuda",
        PYTHONPATH=f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )  # fmt: skip


def test_logs_and_metrics_are_identical(workspace):
    without = run(workspace, "without", "none")
    steps_without, log_without = without.finish(), without.log()
    installed = run(workspace, "installed", "auto")
    steps_with, log_with = installed.finish(), installed.log()
    assert sorted(steps_with) == sorted(steps_without) == [1, 2]
    for step in steps_with:
        assert steps_with[step].keys() == steps_without[step].keys()
        assert values(steps_with[step]) == values(steps_without[step])
    Path("/tmp/with.log").write_text(log_with)
    Path("/tmp/without.log").write_text(log_without)
    assert messages(log_with) == messages(log_without)
    assert not (workspace / "ckpt-installed" / "megatrain").exists()


def values(step: dict[str, float]) -> dict[str, float]:
    """Of a step, without what the clock or the machine says."""
    return {key: value for key, value in step.items() if not re.match(r"timing|perf/", key)}


def messages(log: str) -> Counter:
    return Counter(re.sub(r"\x1b\[[\d;]*m|\d+|0x[\da-f]+", "", line) for line in log.splitlines())
