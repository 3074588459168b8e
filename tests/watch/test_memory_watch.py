"""Memory over time: columns, GPUs that are elsewhere or lost, and peaks that survive thinning."""

import sys
import time

import pytest
from run_fakes import ENGINE, GIB, PAGE, SERVER, STRANGER, WORKER, FakeNvml, FakeProc, processes, ray_run

from megatrain_rl.profiling import GpuProcesses
from megatrain_rl.watch import monitor
from megatrain_rl.watch.memory import MemoryWatch, PeakSeries, open_gpus


@pytest.fixture
def proc(tmp_path):
    return ray_run(tmp_path / "proc")


def watch(proc: FakeProc, *gpus: dict[int, int | None], limit: int = 120) -> tuple[MemoryWatch, FakeNvml]:
    nvml = FakeNvml(*gpus)
    return MemoryWatch(processes(proc), GpuProcesses(nvml=nvml), limit=limit), nvml


def test_gpu_memory_by_role_on_the_gpus_of_the_run(proc):
    """Strangers' processes count in `device_gpu` where the run is, and not at all elsewhere. Both: at one moment."""
    watched, nvml = watch(proc, {WORKER: 8 * GIB, ENGINE: 3 * GIB, STRANGER: 5 * GIB}, {STRANGER: 50 * GIB})
    watched.sample()
    nvml.gpus[0] = {WORKER: 2 * GIB, ENGINE: 7 * GIB, SERVER: None}
    [*points] = watched.take()
    assert [p.high["both_gpu"] / GIB for p in points] == [11, 9]
    gib = monitor.peaks_gib(points)
    assert gib["megatrain/trainer_gpu_peak_gib"] == 8 and gib["megatrain/engine_gpu_peak_gib"] == 7
    assert gib["megatrain/both_gpu_peak_gib"] == 11 and gib["megatrain/device_gpu_peak_gib"] == 17
    assert gib["megatrain/trainer_rss_peak_gib"] == 1000 * PAGE / GIB
    assert len(gib) == 6
    assert len(watched.take()) == 1, "each sample is handed out once"


def test_process_ids_of_another_namespace_are_said_once(proc, caplog):
    watched, _ = watch(proc, {70000: 8 * GIB})
    for _ in range(2):
        assert monitor.peaks_gib(watched.take()).keys() == {
            "megatrain/trainer_rss_peak_gib", "megatrain/run_rss_peak_gib",
        }  # fmt: skip
    assert caplog.text.count("no GPU memory in the figures") == 1


def test_lost_gpu_leaves_host_figures(proc, caplog):
    watched, nvml = watch(proc, {WORKER: GIB})
    watched.sample()
    nvml.lost = {0}
    first, last = watched.take()
    assert "trainer_gpu" in first.high and last.high.keys() == {"trainer_rss", "run_rss"}
    watched.take()
    assert caplog.text.count("no longer measured: GPU is lost") == 1


def test_a_lost_neighbour_leaves_the_figures_of_the_others(proc, caplog):
    watched, nvml = watch(proc, {STRANGER: GIB}, {WORKER: 2 * GIB})
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


def test_thread_samples_until_stopped(proc):
    watched, nvml = watch(proc, {WORKER: GIB})
    watched.start()
    deadline = time.monotonic() + 20
    while len(watched._series.points) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    watched.stop()
    points = watched.take()
    assert len(points) >= 4 and all(p.high["trainer_gpu"] == GIB for p in points)
    assert [p.time for p in points] == sorted(p.time for p in points)
    time.sleep(0.25)
    assert len(watched.take()) == 1


@pytest.mark.parametrize("samples", [7, 8, 9, 1000, 12345])
def test_thinning_keeps_bounds_order_and_peaks(samples):
    series = PeakSeries(8)
    for i in range(samples):
        value = 100 + i % 3
        if i == samples // 2:
            value = 999
        if i == samples // 3:
            value = 1
        series.add(float(i), {"a": value} | ({"rare": 7} if i == samples - 1 else {}))
    points = series.points
    assert len(points) <= 8 and (samples < 9 or len(points) >= 4)
    gaps = {later.time - p.time for p, later in zip(points, points[1:], strict=False)}
    assert points[0].time == 0 and len(gaps) == 1 and min(gaps) > 0, "in order, and all of them hold as many samples"
    assert max(p.high["a"] for p in points) == 999 and min(p.low["a"] for p in points) == 1
    assert points[-1].high["rare"] == 7 and "rare" not in points[0].high
    [peak] = [i for i, p in enumerate(points) if p.high["a"] == 999]
    later = points[peak + 1].time if peak + 1 < len(points) else samples
    assert points[peak].time <= samples // 2 < later, "the peak stays where it was"
