"""A GRPO run through VERL with real vLLM: healthy, killed, resumed, killed again."""

import signal
import time
from pathlib import Path

import grpo_run
import listeners
import psutil
import pytest
import vllm_venv

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

# Titles of the two processes that may be killed.
ENGINE, TRAINER = "VLLM::EngineCore", "ray::WorkerDict"
# Seconds until three steps are done; starting vLLM on a GPU takes most of it.
START_LIMIT = {"cpu": 420, "cuda": 560}
# A run has to end in so many seconds after one of them is gone.
END_LIMIT = 60


class Run:
    def __init__(self, place, folder: Path, name: str, mark: dict[str, str]):
        self.folder, self.log = folder, folder / f"{name}.log"
        command = [place.python, *grpo_run.command(folder, place.device)]
        environment = place.environment | grpo_run.environment(folder) | mark
        self.running = vllm_venv.start(command, log=self.log, environment=environment, cwd=folder)

    def wait_for_step(self, step: int, *, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while max(grpo_run.metrics(self.folder), default=0) < step:
            assert self.running.process.poll() is None, f"ended early:\n{self.log.read_text()[-6000:]}"
            assert time.monotonic() < limit, f"no step {step} in {seconds:g} s:\n{self.log.read_text()[-6000:]}"
            time.sleep(0.2)

    def kill(self, title: str) -> list[psutil.Process]:
        """SIGKILL the process of this title; returns all processes of the run."""
        family = psutil.Process(self.running.process.pid).children(recursive=True)
        [victim] = [p for p in family if " ".join(p.cmdline()).startswith(title)]
        victim.send_signal(signal.SIGKILL)
        return family

    def assert_ends(self, family: list[psutil.Process]) -> str:
        """Check that the run ends with an error and leaves no process; returns what it printed."""
        assert self.running.process.wait(timeout=END_LIMIT) != 0
        _, left = psutil.wait_procs(family, timeout=10)
        left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert left == []
        return self.log.read_text()


@pytest.fixture
def start(place, tmp_path):
    """start(name, mark): a run, whose processes are gone at the end whatever happens.

    mark: variables that its environment has besides.
    """
    grpo_run.make_workspace(tmp_path)
    runs = []

    def start_run(name: str, mark: dict[str, str]) -> Run:
        runs.append(Run(place, tmp_path, name, mark))
        return runs[-1]

    yield start_run
    for run in runs:
        vllm_venv.kill(run.running)


def test_grpo_runs_ends_and_resumes(place, start):
    """Rollout and trainer agree after every sync, also on prompts that were cached before it.

    The engine, then the trainer, is killed in the middle of a step: each time the run ends with one error, and the next
    goes on from the last checkpoint.
    """
    with listeners.watched() as (mark, sockets):
        first = start("first", mark)
        first.wait_for_step(3, seconds=START_LIMIT[place.device])
    assert listeners.beyond_loopback(sockets) == []
    listening = " ".join(socket.process for socket in sockets)
    assert "ray::WorkerDict" in listening and "ray::vLLMHttpServer" in listening
    output = first.assert_ends(first.kill(ENGINE))
    assert "every answer of this batch failed: the rollout engine has died" in output or "took no weights" in output
    steps = grpo_run.metrics(first.folder)
    for step in steps.values():
        assert step["actor/grad_norm"] > 0 and step["actor/skipped_steps"] == 0
        assert step["training/rollout_probs_diff_max"] < {"cpu": 1e-4, "cuda": 1e-3}[place.device]
        if place.device == "cuda":  # NCCL, for one, allocates beside the trainer
            assert step["megatrain/trainer_gpu_peak_gib"] * 2**30 <= grpo_run.GPU_BUDGET_GB * 1e9
    assert abs(steps[1]["actor/kl_loss"]) < 1e-6 and steps[2]["actor/kl_loss"] > 1e-3
    assert not grpo_run.SLEEP_OR_WAKE.search(output)
    assert "'enable_sleep_mode': False" in output
    # one sync before the first step and one after each
    assert output.count("Successfully reset prefix cache") >= 4
    saved = int((first.folder / "ckpt" / "latest_checkpointed_iteration.txt").read_text())
    # a step is saved, then its weights are sent, then it is logged: the engine may have died in any of them
    assert max(steps) - 1 <= saved <= max(steps) + 1

    second = start("second", {})
    second.wait_for_step(saved + 1, seconds=START_LIMIT[place.device])
    output = second.assert_ends(second.kill(TRAINER))
    assert "the trainer's process has died" in output
    assert min(grpo_run.metrics(first.folder)) == saved + 1  # VERL's logger begins a new file
    resumed = grpo_run.metrics(first.folder)[saved + 1]
    assert resumed["training/rollout_probs_diff_max"] < {"cpu": 1e-4, "cuda": 1e-3}[place.device]
    assert resumed["actor/kl_loss"] > 1e-3, "the reference is that of the first run"
