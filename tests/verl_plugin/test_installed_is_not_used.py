"""A run of another strategy is the same with the plug-in installed and without: VERL's FSDP2 engine, on the CPU."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from test_grpo_e2e import Run, grpo, workspace

__all__ = ["workspace"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# A step has one sequence: the rows of a batch come in the order in which they are finished, and sums depend on it. Its
# reward is discounted from token to token, so that advantages differ.
OTHER = [
    "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.ref.strategy=fsdp2", "critic.strategy=fsdp2",
    "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9", "actor_rollout_ref.rollout.n=1",
    "data.train_batch_size=1", "data.seed=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.model.use_remove_padding=false", "actor_rollout_ref.rollout.seed=1",
    "trainer.logger=[console,file]", "trainer.total_training_steps=2", "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
]  # fmt: skip


def run(workspace: Path, name: str, plugins: str) -> Run:
    """plugins: which entry points VERL loads. Both runs have what the CPU needs, from cpu_abilities.py."""
    here = Path(__file__).parent
    (workspace / "one.py").write_text("def compute_score(*arguments, **more):\n    return 1.0\n")
    return grpo(
        workspace, name, *OTHER, f"reward.custom_reward_function.path={workspace}/one.py", f"trainer.default_local_dir={workspace}/ckpt-{name}",
        VERL_USE_EXTERNAL_PLUGINS=plugins, VERL_USE_EXTERNAL_MODULES="cpu_abilities", VERL_ENGINE_DEVICE="cuda",
        HF_DATASETS_CACHE=str(workspace / f"datasets-{name}"),
        PYTHONPATH=f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )  # fmt: skip


def test_logs_and_metrics_are_identical(workspace):
    runs = {"without": run(workspace, "without", "none")}
    try:
        # side by side, the second when the first has its Ray, which gives itself 30 s to start
        runs["without"].wait_for_ray()
        runs["installed"] = run(workspace, "installed", "auto")
        steps_without, steps_installed = runs["without"].finish(), runs["installed"].finish()
    finally:
        for started in runs.values():
            started.stop()
    assert sorted(steps_installed) == sorted(steps_without) == [1, 2]
    for step in steps_without:
        assert steps_installed[step].keys() == steps_without[step].keys()
        assert values(steps_installed[step]) == values(steps_without[step])
    assert steps_without[1]["actor/grad_norm"] > 0
    assert messages(runs["installed"], "installed") == messages(runs["without"], "without")
    assert not (workspace / "ckpt-installed" / "megatrain").exists()


def values(step: dict[str, float]) -> dict[str, float]:
    """Everything in a step but what the clock or the machine's memory says."""
    return {key: value for key, value in step.items() if not re.match(r"timing|perf/|actor/perf/", key)}


def messages(run: Run, name: str) -> Counter:
    """How often each line was written, without numbers, colours and bars of progress. Metrics are compared above."""
    lines = (re.sub(r"\x1b\[[\d;]*m", "", line) for line in re.split(r"[\r\n]+", run.log().replace(name, "NAME")))
    kept = (line for line in lines if "step:" not in line and "it/s]" not in line and "s/it]" not in line)
    return Counter(filter(None, (re.sub(r"0x[\da-f]+|\d+|(?<=actor_id=)\w+", "", line).rstrip() for line in kept)))
