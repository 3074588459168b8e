"""VERL's logger gets our metrics and the run its record and pictures, also when the run fails; a broken monitor stops nothing."""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_fakes import processes, ray_run, step_data

from megatrain_rl.verl_plugin import run_monitor, run_report
from megatrain_rl.watch.memory import MemoryWatch, Point
from megatrain_rl.watch.monitor import RunMonitor
from megatrain_rl.watch.processes import RunProcesses


@pytest.fixture
def proc(tmp_path):
    return ray_run(tmp_path / "proc")


class Spy:
    """A backend of VERL's logger."""

    def __init__(self):
        self.logged: list[tuple[int, dict]] = []

    def log(self, data, step) -> None:
        self.logged.append((step, data))

    def finish(self) -> None:
        pass


CONFIG = {"actor_rollout_ref": {"actor": {"strategy": "megatrain"}}, "trainer": {}}


@pytest.fixture
def tracking(monkeypatch):
    """VERL's `Tracking`, wrapped by the plug-in, and what it writes."""
    from verl.utils.tracking import Tracking

    monkeypatch.setattr(run_monitor, "_watching", False)

    def make(folder: Path, config: dict = CONFIG):
        made = Tracking("p", "e", [], {**config, "trainer": {"default_local_dir": str(folder)}})
        made.logger["console"] = Spy()
        return made, made.logger["console"].logged

    return make


def test_log_gets_each_key_once(tracking, tmp_path):
    """Also when the hook is installed again; validation by itself gets nothing; the caller's dict stays as it is."""
    from verl.utils import tracking as module

    run_monitor.watch_tracking(module)
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
    made.finish()
    lines = run_report.read(tmp_path / "megatrain")
    assert [line["step"] for line in lines] == [0, 1, 2, None]
    assert lines[2]["stages_s"]["update_actor"] == 3.0 and lines[2]["metrics"]["megatrain/optimizer_wait_s"] == 1.75


def test_memory_is_sampled_from_the_start(tracking, tmp_path):
    """VERL makes its logger when trainer and engine are up; what they took meanwhile is in the first step's peaks and in the record."""

    class PPOTrainer:
        def __init__(self, config):
            self.config = config

    module = SimpleNamespace(PPOTrainer=PPOTrainer)
    run_monitor.watch_startup(module)
    run_monitor.watch_startup(module)
    began = time.time()
    assert PPOTrainer({"actor_rollout_ref": {"actor": {"strategy": "fsdp"}}}).config and run_monitor._startup is None
    PPOTrainer(CONFIG)
    watch = run_monitor._startup
    watch.sample()
    made, logged = tracking(tmp_path)
    assert made.megatrain_monitor._watch is watch and run_monitor._startup is None
    made.log({"val-core/x": 1.0}, 0)
    made.finish()
    first = run_report.read(tmp_path / "megatrain")[0]["memory"]["time"][0]
    assert began - 0.1 <= first <= run_report.start(tmp_path / "megatrain")
    assert not watch._thread.is_alive()
    again, _ = tracking(tmp_path)
    assert again.megatrain_monitor._watch is not watch
    again.finish()


@pytest.mark.parametrize(
    "config, ours",
    [
        (CONFIG, True),
        ({"engine": {"strategy": "megatrain"}}, True),
        ({"actor_rollout_ref": {"actor": {"strategy": "fsdp"}}}, False),
        ({"engine": {"strategy": "fsdp"}}, False),
    ],
)
def test_only_runs_of_ours_are_watched(tracking, tmp_path, config, ours):
    made, logged = tracking(tmp_path, config)
    data = {"train/loss": 1.0}
    made.log(data, 1)
    assert ("megatrain/run_rss_peak_gib" in logged[0][1]) == ours
    assert (tmp_path / "megatrain").exists() == ours
    made.finish()


def test_tracking_without_a_config(tracking):
    from verl.utils.tracking import Tracking

    assert Tracking("p", "e", []).megatrain_monitor is None


def test_broken_monitor_is_said_once_and_stops_nothing(tracking, tmp_path, monkeypatch, caplog):
    made, logged = tracking(tmp_path)
    monkeypatch.setattr(MemoryWatch, "take", lambda self: 1 / 0)
    for step in (1, 2):
        made.log(step_data(step, waited=0.0), step)
    assert [data for _, data in logged] == [step_data(step, waited=0.0) for step in (1, 2)]
    assert caplog.text.count("the run is no longer watched") == 1
    made.finish()
    assert not made.megatrain_monitor._watch._thread.is_alive()


def test_folder_that_cannot_be_written_stops_nothing(tracking, tmp_path, monkeypatch, caplog):
    (tmp_path / "megatrain").write_text("a file")
    watch = MemoryWatch(RunProcesses(), None).start()
    monkeypatch.setattr(run_monitor, "_startup", watch)
    made, logged = tracking(tmp_path)
    made.log({"train/loss": 1.0}, 1)
    made.finish()
    assert logged == [(1, {"train/loss": 1.0})]
    assert caplog.text.count("the run is not watched") == 1 and not watch._thread.is_alive()


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


def test_log_prob_gap(tracking, tmp_path, caplog):
    """In nats and over response tokens, from what VERL compares; only in a run of ours."""
    from verl.utils.debug import metrics

    run_monitor.watch_log_probs(metrics)
    rollout = torch.tensor([[-1.0, -20.0, -3.0], [-1.0, -2.0, 9.0]])
    trainer = torch.tensor([[-1.5, -22.0, -3.0], [-1.0, -2.5, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = {"rollout_log_probs": rollout, "old_log_probs": trainer, "response_mask": mask, "responses": mask}
    data = SimpleNamespace(batch=batch)
    alone = metrics.calculate_debug_metrics(data)
    assert "training/rollout_probs_diff_mean" in alone and not any("megatrain" in key for key in alone)
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


def test_trainer_takes_the_wrapped_function():
    from verl.trainer.ppo.v1 import trainer_base
    from verl.utils.debug import metrics

    assert trainer_base.calculate_debug_metrics is metrics.calculate_debug_metrics
    assert metrics.calculate_debug_metrics.megatrain


def test_without_matplotlib_the_record_is_left(proc, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monitor = RunMonitor(tmp_path / "out", MemoryWatch(processes(proc), None))
    with caplog.at_level(logging.WARNING):
        monitor.close()
        monitor.close()
    assert caplog.text.count("no pictures of the run without matplotlib") == 1
    assert "no longer watched" not in caplog.text
    assert [json.loads(line).keys() for line in (tmp_path / "out" / "run.jsonl").read_text().splitlines()] == [
        {"start", "startup_s"}, {"step", "time", "stages_s", "metrics", "memory"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "config, budget",
    [
        ({"actor_rollout_ref": {"actor": {"megatrain": {"gpu_budget_gb": 12}}}}, 12.0),
        ({"engine": {"gpu_budget_gb": 6.5}}, 6.5),
        (CONFIG, 9.0),
        ({"actor_rollout_ref": None, "engine": None}, 9.0),
    ],
)
def test_the_budget_of_a_run(config, budget):
    assert run_monitor.gpu_budget_gb(config) == budget


def test_a_trainer_over_its_budget_is_told_once(proc, tmp_path, monkeypatch, caplog):
    monitor = RunMonitor(tmp_path / "out", MemoryWatch(processes(proc), None), gpu_budget_gb=9)
    for held_gb in (8.9, 9.2, 9.4):
        held = {"trainer_gpu": int(held_gb * 1e9), "trainer_rss": 1}
        point = Point(time=1.0, low=held, high=held)
        monkeypatch.setattr(monitor._watch, "take", lambda point=point: [point])
        monitor.add(step_data(1, waited=0.0), 1)
        assert ("more than its gpu_budget_gb=9" in caplog.text) == (held_gb > 9)
    assert caplog.text.count("holds 9.20 GB of GPU memory") == caplog.text.count("gpu_budget_gb") == 1
    monitor.close()


def test_forked_child_leaves_the_record_alone(proc, tmp_path):
    monitor = RunMonitor(tmp_path / "out", MemoryWatch(processes(proc), None))
    monitor._pid += 1
    monitor.close()
    assert not (tmp_path / "out" / "memory.png").exists()
    monitor._pid -= 1
    monitor.close()
    assert (tmp_path / "out" / "memory.png").exists()
