"""Memory over time: columns, GPUs that are elsewhere or lost, and the thread that samples."""

import sys
import time
from collections.abc import Callable

import pytest
from run_fakes import ENGINE, GIB, PAGE, RUNNER, SERVER, STRANGER, WORKER, FakeNvml

from megatrain_rl.watch import monitor
from megatrain_rl.watch.gpu import GpuProcesses
from megatrain_rl.watch.memory import MemoryWatch, open_gpus
from megatrain_rl.watch.processes import RunProcesses

pytestmark = pytest.mark.usefixtures("proc")


def watch(*gpus: dict[int, int | None]) -> tuple[MemoryWatch, FakeNvml]:
    nvml = FakeNvml(*gpus)
    return MemoryWatch(RunProcesses(RUNNER), GpuProcesses(nvml=nvml)), nvml


def test_gpu_memory_by_role_on_the_gpus_of_the_run():
    """Strangers' processes count in `device_gpu` where the run is, and not at all elsewhere. Both: at one moment."""
    watched, nvml = watch({WORKER: 8 * GIB, ENGINE: 3 * GIB, STRANGER: 5 * GIB}, {STRANGER: 50 * GIB})
    watched.sample()
    nvml.gpus[0] = {WORKER: 2 * GIB, ENGINE: 7 * GIB, SERVER: None}
    [*points] = watched.take()
    assert [p.high["both_gpu"] / GIB for p in points] == [11, 9]
    assert [p.low["device_free"] / GIB for p in points] == [83, 90]
    gib = monitor.peaks_gib(points)
    assert gib["megatrain/trainer_gpu_peak_gib"] == 8 and gib["megatrain/engine_gpu_peak_gib"] == 7
    assert gib["megatrain/both_gpu_peak_gib"] == 11 and gib["megatrain/device_gpu_peak_gib"] == 17
    assert gib["megatrain/trainer_rss_peak_gib"] == 1000 * PAGE / GIB
    assert len(gib) == 6
    assert len(watched.take()) == 1, "each sample is handed out once"


def test_process_ids_of_another_namespace_are_said_once(caplog):
    watched, _ = watch({70000: 8 * GIB})
    for _ in range(2):
        assert monitor.peaks_gib(watched.take()).keys() == {
            "megatrain/trainer_rss_peak_gib", "megatrain/run_rss_peak_gib",
        }  # fmt: skip
    assert caplog.text.count("no GPU memory in the figures") == 1


def test_lost_gpu_leaves_host_figures(caplog):
    watched, nvml = watch({WORKER: GIB})
    watched.sample()
    nvml.lost = {0}
    first, last = watched.take()
    assert "trainer_gpu" in first.high and last.high.keys() == {"trainer_rss", "run_rss"}
    watched.take()
    assert caplog.text.count("no longer measured: GPU is lost") == 1


def test_a_lost_neighbour_leaves_the_figures_of_the_others(caplog):
    watched, nvml = watch({STRANGER: GIB}, {WORKER: 2 * GIB})
    watched.sample()
    nvml.lost = {0}
    watched.sample()
    watched.sample()
    before, at_the_loss, *after = watched.take()
    assert "trainer_gpu" not in at_the_loss.high
    assert all(p.high["trainer_gpu"] == p.high["device_gpu"] - GIB == 2 * GIB for p in (before, *after)) and after
    assert caplog.text.count("no longer measured on the GPU that is lost") == caplog.text.count("measured") == 1


def test_no_nvml_is_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpus() is None


def test_thread_samples_until_stopped():
    watched, _ = watch({WORKER: GIB})
    watched.start()
    wait_for(lambda: len(watched._series.points) >= 3)
    assert watched.running
    watched.stop()
    assert not watched.running
    points = watched.take()
    assert len(points) >= 4 and all(p.high["trainer_gpu"] == GIB for p in points)
    assert [p.time for p in points] == sorted(p.time for p in points)
    time.sleep(0.25)
    assert len(watched.take()) == 1


def test_an_error_of_the_thread_is_told_once_and_ends_it(monkeypatch, caplog):
    watched, _ = watch({WORKER: GIB})
    monkeypatch.setattr(RunProcesses, "refresh", lambda self: 1 / 0)
    watched.start()
    wait_for(lambda: not watched.running)
    watched.stop()
    assert caplog.text.count("no longer sampled") == caplog.text.count("ZeroDivisionError: ") == 1


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.02)
