"""RunMonitor: what each step of a run used, and a record with pictures at its end.

It knows no trainer. Whoever logs the steps hands over a step's number, the seconds of its stages and metrics of its
own, and gets back what to log beside them. Invariant: nothing here stops a training; the first error is told once and
ends the watching.
"""

import atexit
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from megatrain_rl.watch import report
from megatrain_rl.watch.memory import MemoryWatch
from megatrain_rl.watch.peaks import Point

log = logging.getLogger(__name__)


class RunMonitor:
    """Watches one run. `observe` is called once per step, `close` at the end, also of a failed run.

    folder: where the record is written; made if need be. watch: samples memory; started here if it is not yet.
    gpu_budget_gb: a trainer that holds more (GB, 1e9 bytes) is told once. engine: what the rollout engine takes beyond
    this share is a metric of each step, and more than was planned is told once.
    startup_s: seconds of each phase before the first step, for the record.
    stages: which stages the picture shows and under which labels; None shows all, in the order in which they are first
    seen. OSError if the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        watch: MemoryWatch,
        *,
        gpu_budget_gb: float | None = None,
        engine: report.EngineShare | None = None,
        startup_s: dict[str, float] | None = None,
        stages: report.Stages | None = None,
    ):
        self._folder = folder
        self._gpu_budget_gb = gpu_budget_gb
        self._engine = engine
        self._engine_told = False
        self._file = report.RunFile(folder, startup_s, stages, engine)
        self._watch = watch.start()
        self._pid = os.getpid()
        self._done = False
        atexit.register(self.close)  # where nobody closes it

    def observe(
        self, step: int, *, trains: bool, stages_s: Mapping[str, float], metrics: Mapping[str, float]
    ) -> dict[str, float] | None:
        """Write a step into the record; returns what to log of it: `metrics` and, if the step `trains`, the memory
        peaks since the last call, in GiB. stages_s: seconds by stage, of which "step" is the whole step. None once the
        watching has ended."""
        if self._done:
            return None
        try:
            points = self._watch.take()
            ours = dict(metrics)
            if trains:
                ours = peaks_gib(points) | self._beyond_share(points) | ours
                self._hold_against_budget(ours.get("megatrain/trainer_gpu_peak_gib", 0.0))
            self._file.write(step=step, stages_s=dict(stages_s), metrics=ours, memory=points)
        except Exception:
            self.give_up()
            return None
        return ours

    def give_up(self) -> None:
        """End the watching after an error, which is told; the training goes on."""
        self._done = True
        atexit.unregister(self.close)
        self._watch.stop()
        log.warning("the run is no longer watched (megatrain/* metrics, run.jsonl); training goes on", exc_info=True)

    def close(self) -> None:
        """Write what was seen after the last step, and draw. Does nothing when called again or in a forked child."""
        if self._done or os.getpid() != self._pid:
            return
        self._done = True
        atexit.unregister(self.close)
        try:
            self._watch.stop()
            self._file.write(step=None, stages_s={}, metrics={}, memory=self._watch.take())
            self._file.close()
            self._draw()
        except Exception:
            self.give_up()

    def _hold_against_budget(self, peak_gib: float) -> None:
        budget = self._gpu_budget_gb
        held = peak_gib * report.GIB / 1e9
        if budget is None or held <= budget:
            return
        self._gpu_budget_gb = None
        log.warning(
            "the trainer's process holds %.2f GB of GPU memory, more than its gpu_budget_gb=%g: something in it allocates beside the "
            "trainer, and the rollout engine's share may not have room for it",
            held, budget,
        )  # fmt: skip

    def _beyond_share(self, points: list[Point]) -> dict[str, float]:
        """What the engine took beyond its share at most, and the least that was free. The first excess is told."""
        engine, most = self._engine, _most(points, "engine_gpu")
        if engine is None or not most:
            return {}
        beyond = most - engine.share_gb * 1e9
        free = min(p.low["device_free"] for p in points if "device_free" in p.low)
        if beyond > engine.beyond_gb * 1e9 and not self._engine_told:
            self._engine_told = True
            log.warning(
                "the rollout engine holds %.2f GB of GPU memory beyond its share, %.2f were planned, and %.2f GB of the card were "
                "left free: lower rollout.max_num_seqs or rollout.gpu_memory_utilization",
                beyond / 1e9, engine.beyond_gb, free / 1e9,
            )  # fmt: skip
        return {report.BEYOND_SHARE: beyond / report.GIB, report.DEVICE_FREE: free / report.GIB}

    def _draw(self) -> None:
        try:
            made = report.draw(self._folder)
        except ImportError:
            log.warning(
                "no pictures of the run without matplotlib (pip install megatrain-rl[report]); the record is %s",
                self._folder / "run.jsonl",
            )
        else:
            log.info("pictures of the run: %s", ", ".join(map(str, made)))


def peaks_gib(points: list[Point]) -> dict[str, float]:
    """The most of every column that is in use, in GiB, by the name of its metric."""
    columns = sorted({column for point in points for column in point.high} - {"device_free"})
    return {f"megatrain/{column}_peak_gib": _most(points, column) / report.GIB for column in columns}


def _most(points: list[Point], column: str) -> int:
    return max((p.high[column] for p in points if column in p.high), default=0)
