"""Memory over time: Sampler is a thread that looks ten times a second, MemoryWatch is a run looked at that way.

Columns of a run, in bytes: `trainer_gpu`, `engine_gpu`, `both_gpu` (their sum at one moment), `device_gpu` (all that is
in use on the GPUs that the run is on), `device_free` (what is free there), `trainer_rss`, `run_rss`. GPU columns come
from NVML; without it, or where it shows no process of the run, there are none. Host memory is looked at once a second
only: it moves slowly, and a look at it reads files of every process of the run.

MemoryWatch is used by monitor.py, Sampler by bench/memory.py too.
"""

import logging
import threading
import time
from collections.abc import Callable

from megatrain_rl.watch.gpu import GpuProcesses
from megatrain_rl.watch.peaks import PeakSeries, Point
from megatrain_rl.watch.processes import RunProcesses

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.1
HOST_SECONDS = 1.0


class MemoryWatch:
    """Watches the processes of a run from `start` to `stop`. The thread's first error is told and ends it.

    gpus: None where there are none to watch. limit: most points between two calls of `take`.
    """

    def __init__(self, processes: RunProcesses, gpus: GpuProcesses | None, *, limit: int = 120):
        self._processes = processes
        self._gpus = gpus
        self._gpu_seen = gpus is None
        self._limit = limit
        self._series = PeakSeries(limit)
        self._rss: dict[str, int] = {}
        self._rss_time = float("-inf")
        self._lock = threading.Lock()
        self._sampler = Sampler(self.sample, failed=_tell)

    @property
    def running(self) -> bool:
        return self._sampler.running

    def start(self) -> "MemoryWatch":
        """A second call does nothing."""
        self._sampler.start()
        return self

    def stop(self) -> None:
        self._sampler.stop()

    def take(self) -> list[Point]:
        """What was seen since the last call, with the present moment as the last sample."""
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
        """Look once. fresh: at host memory too, however recent the last look at it is."""
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
        whole = free = 0
        seen = False
        for by_process, (device_used, device_free) in zip(used, device, strict=True):
            ours = {process: n for process, n in by_process.items() if process in roles}
            for process, n in ours.items():
                if roles[process] in by_role:
                    by_role[roles[process]] += n
            seen |= bool(ours)
            whole += device_used if ours else 0
            free += device_free if ours else 0
        if not seen:
            return {}
        trainer, engine = by_role["trainer"], by_role["engine"]
        return {
            "trainer_gpu": trainer, "engine_gpu": engine, "both_gpu": trainer + engine, "device_gpu": whole, "device_free": free,
        }  # fmt: skip


def open_gpus() -> GpuProcesses | None:
    """The GPUs of this machine; None, and a line in the log that says why, where NVML cannot be had."""
    try:
        return GpuProcesses()
    except Exception as error:  # no package, no driver, no GPU
        log.info("GPU memory is not measured: %s", error)
        return None


class Sampler:
    """Calls `sample` every 100 ms on a thread, from `start` to `stop` or the first error, which `failed` is given."""

    def __init__(self, sample: Callable[[], None], *, failed: Callable[[Exception], None]):
        self._sample = sample
        self._failed = failed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """A second call does nothing."""
        if not self.running:
            self._thread.start()

    def stop(self) -> None:
        """When it returns, nothing is sampled any more."""
        self._stop.set()
        if self.running:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(SAMPLE_SECONDS):
                self._sample()
        except Exception as error:
            self._failed(error)


def _tell(error: Exception) -> None:
    log.warning("the memory of the run is no longer sampled; training goes on", exc_info=error)
