"""Memory of a run over time: GPU by NVML ten times a second, host by the kernel once a second, on a thread of this process.

Columns, in bytes: `trainer_gpu`, `engine_gpu`, `both_gpu` (their sum at one moment), `device_gpu` (all that is in use on the GPUs that the
run is on), `trainer_rss`, `run_rss`. Without NVML, or where it shows no process of the run, there are no GPU columns. Used by monitor.py.
"""

import logging
import threading
import time
from dataclasses import dataclass

from megatrain_rl.profiling import SAMPLE_SECONDS, GpuProcesses
from megatrain_rl.watch.processes import RunProcesses

log = logging.getLogger(__name__)

HOST_SECONDS = 1.0


@dataclass(frozen=True)
class Point:
    """A stretch of samples. time: Unix seconds of the first; low, high: least and most of each column."""

    time: float
    low: dict[str, int]
    high: dict[str, int]

    def joined(self, later: "Point") -> "Point":
        return Point(
            time=self.time,
            low={c: min(p.low[c] for p in (self, later) if c in p.low) for c in self.low | later.low},
            high={c: max(p.high[c] for p in (self, later) if c in p.high) for c in self.high | later.high},
        )


class PeakSeries:
    """At most `limit` points, however many samples: once full, neighbours are joined and every later point holds twice the samples.
    Peaks and troughs stay."""

    def __init__(self, limit: int):
        assert limit >= 2 and limit % 2 == 0
        self.points: list[Point] = []
        self._limit = limit
        self._samples_each = 1
        self._samples_in_last = 1

    def add(self, now: float, values: dict[str, int]) -> None:
        point = Point(time=now, low=values, high=values)
        if self.points and self._samples_in_last < self._samples_each:
            self.points[-1] = self.points[-1].joined(point)
            self._samples_in_last += 1
            return
        if len(self.points) == self._limit:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [first.joined(second) for first, second in pairs]
            self._samples_each *= 2
        self.points.append(point)
        self._samples_in_last = 1


def open_gpus() -> GpuProcesses | None:
    """None, and one line that says why, where NVML cannot be had."""
    try:
        return GpuProcesses()
    except Exception as error:  # no package, no driver, no GPU
        log.info("GPU memory is not measured: %s", error)
        return None


class MemoryWatch:
    """Samples from `start` to `stop`. limit: points between two calls of `take`."""

    def __init__(self, processes: RunProcesses, gpus: GpuProcesses | None, *, limit: int = 120):
        self._processes = processes
        self._gpus = gpus
        self._gpu_seen = gpus is None
        self._limit = limit
        self._series = PeakSeries(limit)
        self._rss: dict[str, int] = {}
        self._rss_time = float("-inf")
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def start(self) -> "MemoryWatch":
        """A second call does nothing."""
        if not self._thread.is_alive():
            self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def take(self) -> list[Point]:
        """What was seen since the last call, now included."""
        self.sample(fresh=True)
        with self._lock:
            points = self._series.points
            self._series = PeakSeries(self._limit)
        if not self._gpu_seen and not any("device_gpu" in p.high for p in points):
            log.warning(
                "no GPU memory in the figures: NVML shows no process of this run, or other process ids (container)"
            )
        self._gpu_seen = True
        return points

    def sample(self, *, fresh: bool = False) -> None:
        """fresh: look at host memory too, however recent the last look is."""
        with self._lock:
            now = time.monotonic()
            if fresh or now - self._rss_time >= HOST_SECONDS:
                self._processes.refresh()
                self._rss = {f"{who}_rss": value for who, value in self._processes.rss_bytes().items()}
                self._rss_time = now
            self._series.add(time.time(), self._rss | self._gpu_memory())

    def _gpu_memory(self) -> dict[str, int]:
        if self._gpus is None:
            return {}
        try:
            used, device = self._gpus.used_bytes(), self._gpus.device_bytes()
        except Exception as error:  # a lost GPU or driver must not cost the figures of the others or the host's
            left = self._gpus.drop_lost()
            log.warning("GPU memory is no longer measured%s: %s", " on the GPU that is lost" if left else "", error)
            self._gpus = self._gpus if left else None
            return {}
        roles = self._processes.roles
        by_role = {"trainer": 0, "engine": 0}
        whole = 0
        seen = False
        for by_process, device_bytes in zip(used, device, strict=True):
            ours = {process: n for process, n in by_process.items() if process in roles}
            for process, n in ours.items():
                if roles[process] in by_role:
                    by_role[roles[process]] += n
            seen |= bool(ours)
            whole += device_bytes if ours else 0
        if not seen:
            return {}
        trainer, engine = by_role["trainer"], by_role["engine"]
        return {"trainer_gpu": trainer, "engine_gpu": engine, "both_gpu": trainer + engine, "device_gpu": whole}

    def _run(self) -> None:
        try:
            while not self._stop.wait(SAMPLE_SECONDS):
                self.sample()
        except Exception:
            log.warning("the memory of the run is no longer sampled; training goes on", exc_info=True)
