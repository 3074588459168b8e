"""VERL's logger gets our metrics, a run its record and pictures, even if it fails; a failing monitor stops nothing."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatrain_rl.verl_plugin import monitoring
from megatrain_rl.watch import report
from megatrain_rl.watch.memory import MemoryWatch
from megatrain_rl.watch.processes import RunProcesses
from verl_patches import ours

SFT = {"engine": {"strategy": "megatrain"}, "trainer": {}}
RL = {"actor_rollout_ref": {"actor": {"strategy": "megatrain"}}, "trainer": {}}


def step_data(step: int, *, waited: float) -> dict:
    timing = {"gen": 2.0, "old_log_prob": 1.0, "ref": 1.0, "update_actor": 3.0, "update_weights": 0.5, "step": 8.0}
    return {
        "training/global_step": step,
        "actor/grad_norm": 1.0,
        "actor/optimizer_wait_s/max": waited,
        "actor/weight_sync_wait_s/max": waited / 2,
        **{f"timing_s/{name}": seconds for name, seconds in timing.items()},
    }


class Spy:
    """A backend of VERL's logger."""

    def __init__(self):
        self.logged: list[tuple[int, dict]] = []
        self.finished = 0

    def log(self, data, step) -> None:
        self.logged.append((step, data))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def tracking(monkeypatch):
    """VERL's `Tracking`, as the plug-in has it, and what it writes."""
    from verl.utils.tracking import Tracking

    monkeypatch.setattr(monitoring, "_compares", False)
    monkeypatch.setattr(ours, "_trainer_lives_here", False)

    def make(folder: Path, config: dict = RL):
        made = Tracking("p", "e", [], {**config, "trainer": {"default_local_dir": str(folder)}})
        made.logger["file"] = Spy()
        return made, made.logger["file"].logged

    return make


def test_log_gets_each_key_once(tracking, tmp_path):
    """Validation by itself gets nothing; the caller's dict stays as it is."""
    made, logged = tracking(tmp_path)
    made.log(data={"val-core/x": 1.0}, step=0)
    assert logged == [(0, {"val-core/x": 1.0})]
    for step, waited in ((1, 0.5), (2, 2.25)):
        data = step_data(step, waited=waited)
        given = dict(data)
        made.log(data=data, step=step)
        assert data == given
    waits = {"megatrain/optimizer_wait_s", "megatrain/weight_sync_wait_s"}
    ours = {"megatrain/trainer_rss_peak_gib", "megatrain/run_rss_peak_gib"} | waits
    for step, data in logged[1:]:
        assert data.keys() == (given.keys() | ours) - {"actor/optimizer_wait_s/max", "actor/weight_sync_wait_s/max"}
        assert data["training/global_step"] == step
        assert 0.05 < data["megatrain/trainer_rss_peak_gib"] <= data["megatrain/run_rss_peak_gib"]
    assert [data["megatrain/optimizer_wait_s"] for _, data in logged[1:]] == [0.5, 1.75]
    assert [data["megatrain/weight_sync_wait_s"] for _, data in logged[1:]] == [0.25, 0.875]
    spy = made.logger["file"]
    made.finish(exit_code=0)
    begin = json.loads((tmp_path / "megatrain" / "run.jsonl").read_text().splitlines()[0])
    assert list(begin["stages"]["in_step"].items()) == [
        ("gen", "generate"), ("reward", "reward"), ("old_log_prob", "old_log_prob"), ("ref", "reference"),
        ("values", "values"), ("adv", "adv"), ("update_critic", "update_critic"), ("update_actor", "update"),
        ("save_checkpoint", "save_checkpoint"), ("update_weights", "weight sync"),
    ]  # fmt: skip
    assert list(begin["stages"]["after_step"]) == ["testing", "dump_rollout_generations"]
    lines = report.read(tmp_path / "megatrain")
    assert [line["step"] for line in lines] == [0, 1, 2, None]
    assert lines[2]["stages_s"]["update_actor"] == 3.0 and lines[2]["metrics"]["megatrain/optimizer_wait_s"] == 1.75
    made.finish()
    assert spy.finished == 1


def test_it_stays_verls_logger(tracking, tmp_path):
    from verl.utils.tracking import Tracking

    made, _ = tracking(tmp_path)
    assert isinstance(made, Tracking) and type(made) is not Tracking
    made.finish()


def test_memory_is_sampled_from_the_start(tmp_path):
    """VERL makes its logger last. The memory that was taken before is in the first step's peaks and in the record."""
    from verl.utils.tracking import Tracking

    began = time.time()
    watch = monitoring.watch_memory()
    watch.sample()
    made = Tracking("p", "e", [])
    config = {**RL, "trainer": {"default_local_dir": str(tmp_path)}}
    assert monitoring.attach(made, config, watch=watch, startup_s={"data": 3.0})
    made.log({"val-core/x": 1.0}, 0)
    made.finish()
    first = report.read(tmp_path / "megatrain")[0]["memory"]["time"][0]
    assert began - 0.1 <= first <= report.start(tmp_path / "megatrain") + 0.01, "within the rounding of the record"
    assert report.startup_s(tmp_path / "megatrain") == {"data": 3.0}
    assert not watch.running


@pytest.mark.parametrize(
    "config, ours",
    [
        (RL, True),
        (SFT, True),
        ({"actor_rollout_ref": {"actor": {"strategy": "fsdp"}}}, False),
        ({"engine": {"strategy": "fsdp"}}, False),
        ({"engine": "vllm", "critic": "none", "actor_rollout_ref": ["of another library"]}, False),
    ],
)
def test_only_runs_of_ours_are_watched(tracking, tmp_path, config, ours):
    from verl.utils.tracking import Tracking

    made, logged = tracking(tmp_path, config)
    data = {"train/loss": 1.0}
    made.log(data, 1)
    assert ("megatrain/run_rss_peak_gib" in logged[0][1]) == ours
    assert (tmp_path / "megatrain").exists() == ours and (type(made) is Tracking) != ours
    made.finish()


def test_tracking_without_a_config():
    from verl.utils.tracking import Tracking

    assert type(Tracking("p", "e", [])) is Tracking


@pytest.mark.parametrize("broken", ["memory", "timing"])
def test_broken_monitor_is_said_once_and_stops_nothing(tracking, tmp_path, monkeypatch, caplog, broken):
    made, logged = tracking(tmp_path)
    data = step_data(1, waited=0.0)
    if broken == "memory":
        monkeypatch.setattr(MemoryWatch, "take", lambda self: 1 / 0)
    else:
        data["timing_s/gen"] = "of no use"
    for step in (1, 2):
        made.log(data, step)
    assert [got for _, got in logged] == [data, data]
    assert caplog.text.count("the run is no longer watched") == 1
    made.finish()
    assert not made.step_log._monitor._watch.running


def test_folder_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    from verl.utils.tracking import Tracking

    (tmp_path / "megatrain").write_text("a file")
    watch = MemoryWatch(RunProcesses(), None).start()
    made = Tracking("p", "e", [])
    made.logger["file"] = Spy()
    logged = made.logger["file"].logged
    assert not monitoring.attach(made, {**RL, "trainer": {"default_local_dir": str(tmp_path)}}, watch=watch)
    made.log({"train/loss": 1.0}, 1)
    made.finish()
    assert logged == [(1, {"train/loss": 1.0})]
    assert caplog.text.count("the run is not watched") == 1 and not watch.running


def test_no_sampling_goes_on_for_a_logger_that_is_not_watched(tracking, tmp_path, monkeypatch):
    (tmp_path / "megatrain").write_text("a file")
    made_watches = []
    start = MemoryWatch.start
    monkeypatch.setattr(MemoryWatch, "start", lambda self: made_watches.append(self) or start(self))
    made, logged = tracking(tmp_path, SFT)
    made.log({"train/loss": 1.0}, 1)
    made.finish()
    assert logged == [(1, {"train/loss": 1.0})] and not any(watch.running for watch in made_watches)


def test_forgotten_logger_still_leaves_the_pictures(tmp_path):
    """A run that fails, with a logger that nobody finishes or collects: the record and pictures come at exit."""
    code = f"""
import sys
from verl.utils.tracking import Tracking
config = {{"engine": {{"strategy": "megatrain"}}, "trainer": {{"default_local_dir": {str(tmp_path)!r}}}}}
tracking = Tracking("p", "e", [], config)
tracking.log({{"train/loss": 1.0}}, 1)
raise RuntimeError("the run failed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "the run failed" in done.stderr
    assert (tmp_path / "megatrain" / "memory.png").exists()
    assert not (tmp_path / "megatrain" / "stages.png").exists(), "SFT logs no stage times"


@pytest.mark.parametrize(
    "config, budget",
    [
        ({"actor_rollout_ref": {"actor": {"megatrain": {"gpu_budget_gb": 12}}}}, 12.0),
        ({"engine": {"gpu_budget_gb": 6.5}}, 6.5),
        (RL, 9.0),
        ({"actor_rollout_ref": None, "engine": None}, 9.0),
    ],
)
def test_the_budget_of_a_run(config, budget):
    assert monitoring.gpu_budget_gb(config) == budget


def test_log_prob_gap(tracking, tmp_path, caplog):
    """The gap is in nats, over response tokens, from what VERL compares, and only in a run of ours."""
    from verl.utils.debug import metrics

    rollout = torch.tensor([[-1.0, -20.0, -3.0], [-1.0, -2.0, 9.0]])
    trainer = torch.tensor([[-1.5, -22.0, -3.0], [-1.0, -2.5, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = {"rollout_log_probs": rollout, "old_log_probs": trainer, "response_mask": mask, "responses": mask}
    data = SimpleNamespace(batch=batch)
    made, _ = tracking(tmp_path, {"actor_rollout_ref": {"actor": {"strategy": "fsdp"}}})
    alone = metrics.calculate_debug_metrics(data)
    assert "training/rollout_probs_diff_mean" in alone and not any("megatrain" in key for key in alone)
    made.finish()
    made, _ = tracking(tmp_path)
    watched = metrics.calculate_debug_metrics(data)
    gap = {"megatrain/rollout_log_prob_gap_mean": pytest.approx(0.6), "megatrain/rollout_log_prob_gap_max": 2.0}
    assert watched == {**alone, **gap}
    nothing = SimpleNamespace(batch={**batch, "response_mask": torch.zeros_like(mask)})
    assert not any("megatrain" in key for key in metrics.calculate_debug_metrics(nothing))
    # another mask is what VERL falls back to; ours then stays away, and says so once
    for _ in range(2):
        other = SimpleNamespace(
            batch={k: v for k, v in batch.items() if k != "response_mask"} | {"attention_mask": mask}
        )
        assert metrics.calculate_debug_metrics(other) == alone
    assert caplog.text.count("log-prob gap is no longer measured") == 1
    made.finish()


def test_verls_trainers_take_the_wrapped_function():
    from verl.trainer.ppo.v1 import trainer_base
    from verl.utils.debug import metrics

    from verl_patches.wrap import patches_of

    assert trainer_base.calculate_debug_metrics is metrics.calculate_debug_metrics
    assert patches_of(metrics.calculate_debug_metrics) == ("verl_patches.log_prob_gap",)
