"""Each step gets its metrics, and each run its record and pictures, failed or not. A broken monitor stops nothing."""

import json
import logging
import subprocess
import sys
import time

import pytest
from run_fakes import ENGINE, GIB, RUNNER, STAGES_S, FakeNvml

from megatrain_rl.watch import report
from megatrain_rl.watch.gpu import GpuProcesses
from megatrain_rl.watch.memory import MemoryWatch
from megatrain_rl.watch.monitor import RunMonitor
from megatrain_rl.watch.peaks import Point
from megatrain_rl.watch.processes import RunProcesses

RSS = {"megatrain/trainer_rss_peak_gib", "megatrain/run_rss_peak_gib"}


def this_process() -> MemoryWatch:
    return MemoryWatch(RunProcesses(), None)


def fake_run() -> MemoryWatch:
    return MemoryWatch(RunProcesses(RUNNER), None)


def test_a_step_gets_its_metrics_and_a_line(tmp_path):
    """A step that trains nothing, such as a validation by itself, gets no peaks. The caller's dict stays as it is."""
    monitor = RunMonitor(tmp_path / "out", this_process())
    assert monitor.observe(0, trains=False, stages_s={}, metrics={}) == {}
    for step, waited in ((1, 0.5), (2, 1.75)):
        metrics = {report.OPTIMIZER_WAIT: waited, report.SYNC_WAIT: waited / 2}
        given = dict(metrics)
        logged = monitor.observe(step, trains=True, stages_s=STAGES_S, metrics=metrics)
        assert metrics == given
        assert logged.keys() == RSS | given.keys() and given.items() <= logged.items()
        assert 0.05 < logged["megatrain/trainer_rss_peak_gib"] <= logged["megatrain/run_rss_peak_gib"]
    monitor.close()
    lines = report.read(tmp_path / "out")
    assert [line["step"] for line in lines] == [0, 1, 2, None]
    assert lines[2]["stages_s"] == STAGES_S and lines[2]["metrics"][report.OPTIMIZER_WAIT] == 1.75
    assert lines[2]["metrics"].keys() == logged.keys()


def test_what_was_sampled_before_the_first_step_is_in_its_line(tmp_path):
    """Memory may be watched long before there is a monitor, while the run starts."""
    watch = this_process()
    began = time.time()
    watch.sample()
    monitor = RunMonitor(tmp_path / "out", watch.start())
    assert watch.running
    monitor.observe(0, trains=False, stages_s={}, metrics={})
    monitor.close()
    first = report.read(tmp_path / "out")[0]["memory"]["time"][0]
    # times in a line are rounded to hundredths of a second
    assert began - 0.01 <= first <= report.start(tmp_path / "out") + 0.01
    assert not watch.running


def test_a_watch_that_nobody_started_is_started(tmp_path):
    watch = this_process()
    monitor = RunMonitor(tmp_path / "out", watch)
    assert watch.running
    monitor.close()


def test_the_record_names_its_stages(tmp_path):
    stages = report.Stages(in_step={"gen": "generate"}, after_step={"testing": "validation"})
    RunMonitor(tmp_path / "out", this_process(), startup_s={"load": 2.0}, stages=stages).close()
    start = json.loads((tmp_path / "out" / "run.jsonl").read_text().splitlines()[0])
    assert start["startup_s"] == {"load": 2.0}
    assert start["stages"] == {"in_step": {"gen": "generate"}, "after_step": {"testing": "validation"}}


def test_an_engine_beyond_its_part_of_the_gpu_is_told_once(tmp_path, proc, caplog):
    """The share is 3 GB here, and 1 GB more was planned."""
    nvml = FakeNvml({RUNNER: GIB, ENGINE: 3 * 10**9})
    watch = MemoryWatch(RunProcesses(RUNNER), GpuProcesses(nvml=nvml))
    share = report.EngineShare(share_gb=3.0, beyond_gb=1.0)
    monitor = RunMonitor(tmp_path / "out", watch, engine=share)
    logged = []
    for used in (3.5, 4.5, 4.6):
        nvml.gpus[0][ENGINE] = int(used * 1e9)
        watch.take()  # what the thread has seen until now
        logged.append(monitor.observe(len(logged), trains=True, stages_s={}, metrics={}))
        assert caplog.text.count("max_num_seqs") == (0 if used == 3.5 else 1)
    assert [round(step[report.BEYOND_SHARE] * GIB / 1e9, 3) for step in logged] == [0.5, 1.5, 1.6]
    assert logged[0][report.DEVICE_FREE] == pytest.approx(98 - 3.5e9 / GIB)
    monitor.close()
    assert report.engine_share(tmp_path / "out") == share


def test_broken_monitor_is_told_once_and_stops_nothing(tmp_path, monkeypatch, caplog):
    watch = this_process()
    monitor = RunMonitor(tmp_path / "out", watch)
    monkeypatch.setattr(MemoryWatch, "take", lambda self: 1 / 0)
    for step in (1, 2):
        assert monitor.observe(step, trains=True, stages_s=STAGES_S, metrics={}) is None
    monitor.close()
    assert caplog.text.count("the run is no longer watched") == 1 and caplog.text.count("ZeroDivisionError: ") == 1
    assert not watch.running


def test_an_end_that_goes_wrong_is_told_once(tmp_path, monkeypatch, caplog):
    watch = this_process()
    monitor = RunMonitor(tmp_path / "out", watch)
    monkeypatch.setattr(report, "draw", lambda folder: 1 / 0)
    monitor.close()
    monitor.close()
    assert caplog.text.count("the run is no longer watched") == 1 and not watch.running


def test_folder_that_cannot_be_written(tmp_path):
    """The caller is told, and nothing was begun."""
    (tmp_path / "out").write_text("a file")
    watch = this_process()
    with pytest.raises(OSError, match="out"):
        RunMonitor(tmp_path / "out", watch)
    assert not watch.running


def test_forgotten_monitor_still_leaves_the_pictures(tmp_path):
    """When a run fails and nobody closes its monitor, record and pictures come at exit."""
    code = f"""
from pathlib import Path
from megatrain_rl.watch.memory import MemoryWatch
from megatrain_rl.watch.monitor import RunMonitor
from megatrain_rl.watch.processes import RunProcesses
monitor = RunMonitor(Path({str(tmp_path)!r}), MemoryWatch(RunProcesses(), None))
monitor.observe(1, trains=True, stages_s={{}}, metrics={{}})
raise RuntimeError("the run failed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "the run failed" in done.stderr
    assert (tmp_path / "memory.png").exists()
    assert not (tmp_path / "stages.png").exists(), "no step had times of its stages"


@pytest.mark.usefixtures("proc")
def test_without_matplotlib_the_record_is_left(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monitor = RunMonitor(tmp_path / "out", fake_run())
    with caplog.at_level(logging.WARNING):
        monitor.close()
        monitor.close()
    assert caplog.text.count("no pictures of the run without matplotlib") == 1
    assert "no longer watched" not in caplog.text
    assert [json.loads(line).keys() for line in (tmp_path / "out" / "run.jsonl").read_text().splitlines()] == [
        {"start", "startup_s"}, {"step", "time", "stages_s", "metrics", "memory"},
    ]  # fmt: skip


@pytest.mark.usefixtures("proc")
def test_a_trainer_over_its_budget_is_told_once(tmp_path, monkeypatch, caplog):
    watch = fake_run()
    monitor = RunMonitor(tmp_path / "out", watch, gpu_budget_gb=9)
    for held_gb in (8.9, 9.2, 9.4):
        held = {"trainer_gpu": int(held_gb * 1e9), "trainer_rss": 1}
        point = Point(time=1.0, low=held, high=held)
        monkeypatch.setattr(watch, "take", lambda point=point: [point])
        monitor.observe(1, trains=True, stages_s=STAGES_S, metrics={})
        assert ("more than its gpu_budget_gb=9" in caplog.text) == (held_gb > 9)
    assert caplog.text.count("holds 9.20 GB of GPU memory") == caplog.text.count("gpu_budget_gb") == 1
    monitor.close()


@pytest.mark.usefixtures("proc")
def test_forked_child_leaves_the_record_alone(tmp_path):
    monitor = RunMonitor(tmp_path / "out", fake_run())
    monitor._pid += 1
    monitor.close()
    assert not (tmp_path / "out" / "memory.png").exists()
    monitor._pid -= 1
    monitor.close()
    assert (tmp_path / "out" / "memory.png").exists()


def test_watching_needs_neither_torch_nor_verl():
    code = "import sys, megatrain_rl.watch.monitor; assert not {'torch', 'verl', 'ray'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
