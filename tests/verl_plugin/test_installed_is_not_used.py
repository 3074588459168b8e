"""A run of another strategy is the same with the plug-in installed and without: VERL's FSDP2 engine, on the CPU.

Held against each other: every metric but times and memory, every message, and the config that VERL prints. The rollout
is not vLLM here, and both runs have what a CPU needs (cpu_abilities.py), one patch among it. That the patches of vLLM's
parts leave other rollouts alone is tested beside each of them, that VERL's trainers keep their poll interval in
task_runner/test_run_trainer.py.
"""

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from test_grpo_e2e import Run, grpo, one_line, printed_settings, workspace

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


# also tells whether the plug-in is in the process
REWARD = """
import sys

print("the plug-in is there:", "megatrain_rl.verl_plugin.register" in sys.modules, flush=True)


def compute_score(*arguments, **more):
    return 1.0
"""


def run(workspace: Path, name: str, plugins: str) -> Run:
    """plugins: which entry points VERL loads. Both runs have what the CPU needs, from cpu_abilities.py."""
    here = Path(__file__).parent
    (workspace / "one.py").write_text(REWARD)
    return grpo(
        workspace, name, *OTHER, f"reward.custom_reward_function.path={workspace}/one.py", f"trainer.default_local_dir={workspace}/ckpt-{name}",
        VERL_USE_EXTERNAL_PLUGINS=plugins, VERL_USE_EXTERNAL_MODULES="cpu_abilities", VERL_ENGINE_DEVICE="cuda", RAY_DEDUP_LOGS="0",
        HF_DATASETS_CACHE=str(workspace / f"datasets-{name}"),
        TQ_PERF_LOG_FLUSH_INTERVAL="86400",  # seconds after which TransferQueue tells how fast it was, on a slow machine
        PYTHONPATH=f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )  # fmt: skip


def test_logs_and_metrics_are_identical(workspace):
    runs = {"run-a": run(workspace, "run-a", "none")}
    try:
        # side by side, the second when the first has its Ray, which gives itself 30 s to start
        runs["run-a"].wait_for_ray()
        runs["run-b"] = run(workspace, "run-b", "auto")
        without, installed = runs["run-a"].finish(), runs["run-b"].finish()
    finally:
        for started in runs.values():
            started.stop()
    told = [re.findall(r"the plug-in is there: (\w+)", started.log()) for started in runs.values()]
    assert set(told[0]) == {"False"} and set(told[1]) == {"True"}
    assert sorted(installed) == sorted(without) == [1, 2]
    for step in without:
        assert installed[step].keys() == without[step].keys()
        assert values(installed[step]) == values(without[step])
    assert without[1]["actor/grad_norm"] > 0
    for a, b in zip(messages(runs["run-a"], "run-a"), messages(runs["run-b"], "run-b"), strict=True):
        assert (b - a, a - b) == (Counter(), Counter()), "told more often with the plug-in, and without it"
    assert not (workspace / "ckpt-run-b" / "megatrain").exists()


def values(step: dict[str, float]) -> dict[str, float]:
    """Everything in a step but what the clock or the machine's memory says."""
    return {key: value for key, value in step.items() if not re.match(r"timing|perf/|actor/perf/", key)}


def messages(run: Run, name: str) -> tuple[Counter, Counter]:
    """The settings that were printed, as (name, value), and the words that were, each with how often.

    Words and not lines: Ray cuts lines where it likes. Bars of progress are left out, and metrics, which are compared
    above, and outside the settings numbers: processes, ports, times of day.
    """
    left_out = re.compile(r"\bstep:\d+ - |it/s\]|s/it\]|examples/s\]|\?it/s|the plug-in is there")
    whole = one_line(run.log().replace(name, "NAME"), left_out=left_out)
    settings = printed_settings(whole)
    words = re.findall(r"[A-Za-z_][\w./-]*", re.sub(r"(?<=actor_id=)\w+|0x[\da-f]+", "", whole))
    return Counter(settings), Counter(re.sub(r"\d+", "", word) for word in words)
