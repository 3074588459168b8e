"""Watches a run from VERL's logger: adds what VERL does not measure to every step, and leaves a record and pictures at the end.

`watch_tracking` wraps `verl.utils.tracking.Tracking`, which exists once a run, in the process that logs: the task runner in RL, the trainer
in SFT. VERL makes it when everything else is up; `watch_startup` has memory sampled from the start in RL. Only runs whose strategy is megatrain are watched. `watch_log_probs` wraps the function that compares rollout and trainer. The
folder is `trainer.default_local_dir`/megatrain. Invariant: nothing here stops a training; the first error is told once and ends the watching.

Seconds of stages are VERL's timing_s/*, tokens/s without padding its perf/throughput; neither is repeated under another name.
"""

import atexit
import functools
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatrain_rl.config import StreamConfig
from megatrain_rl.verl_plugin import run_report, startup_times
from megatrain_rl.verl_plugin.memory_watch import MemoryWatch, Point, open_gpus
from megatrain_rl.verl_plugin.run_processes import RunProcesses

log = logging.getLogger(__name__)

FOLDER = "megatrain"
# What the engine reports, seconds since the start, of several mini-batches the last (see engine.py); and what becomes of it
_WAITED = {
    "actor/optimizer_wait_s/max": run_report.OPTIMIZER_WAIT,
    "actor/weight_sync_wait_s/max": run_report.SYNC_WAIT,
}
# One of these marks what is logged of a training step, in RL and in SFT; validation is logged by itself too
_STEP_KEYS = ("training/global_step", "train/loss")


class RunMonitor:
    """One run. `add` once per call of the logger, `close` at the end, also of a failed run. A trainer that holds more than `gpu_budget_gb`
    is told once."""

    def __init__(
        self,
        folder: Path,
        watch: MemoryWatch,
        *,
        gpu_budget_gb: float | None = None,
        startup_s: dict[str, float] | None = None,
    ):
        self._folder = folder
        self._gpu_budget_gb = gpu_budget_gb
        self._file = run_report.RunFile(folder, startup_s)
        self._watch = watch.start()
        self._waited_s = dict.fromkeys(_WAITED, 0.0)
        self._pid = os.getpid()
        self._done = False
        atexit.register(self.close)  # where nobody finishes the logger

    def add(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """What to log instead of `data`: the same and ours. As given after an error."""
        if self._done:
            return data
        try:
            return self._add(data, step)
        except Exception:
            self._give_up()
            return data

    def close(self) -> None:
        """Write what was seen after the last step and draw. A second call does nothing, nor does one in a forked child."""
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
            self._give_up()

    def _add(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        points = self._watch.take()
        ours: dict[str, float] = {}
        if any(key in data for key in _STEP_KEYS):
            ours = peaks_gib(points)
            self._hold_against_budget(ours.get("megatrain/trainer_gpu_peak_gib", 0.0))
        rest = dict(data)
        for reported, name in _WAITED.items():
            if reported in rest:
                waited_s = float(rest.pop(reported))
                ours[name] = waited_s - self._waited_s[reported]
                self._waited_s[reported] = waited_s
        stages_s = {key.removeprefix("timing_s/"): float(data[key]) for key in data if key.startswith("timing_s/")}
        self._file.write(step=step, stages_s=stages_s, metrics=ours, memory=points)
        return rest | ours

    def _hold_against_budget(self, peak_gib: float) -> None:
        budget = self._gpu_budget_gb
        held = peak_gib * run_report.GIB / 1e9
        if budget is None or held <= budget:
            return
        self._gpu_budget_gb = None
        log.warning(
            "the trainer's process holds %.2f GB of GPU memory, more than its gpu_budget_gb=%g: something in it allocates beside the "
            "trainer, and the rollout engine's share may not have room for it",
            held, budget,
        )  # fmt: skip

    def _draw(self) -> None:
        try:
            made = run_report.draw(self._folder)
        except ImportError:
            log.warning(
                "no pictures of the run without matplotlib (pip install megatrain-rl[report]); the record is %s",
                self._folder / "run.jsonl",
            )
        else:
            log.info("pictures of the run: %s", ", ".join(map(str, made)))

    def _give_up(self) -> None:
        self._done = True
        atexit.unregister(self.close)
        self._watch.stop()
        log.warning("the run is no longer watched (megatrain/* metrics, run.jsonl); training goes on", exc_info=True)


def peaks_gib(points: list[Point]) -> dict[str, float]:
    """The most of every column, as metrics."""
    columns = sorted({column for point in points for column in point.high})
    return {
        f"megatrain/{column}_peak_gib": max(p.high[column] for p in points if column in p.high) / run_report.GIB
        for column in columns
    }


def log_prob_gap(rollout: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, float]:
    """|log-prob by the rollout - log-prob by the trainer| in nats over response tokens: mean and largest. All (B, T); VERL logs the gap of
    probabilities, which hides that of unlikely tokens."""
    gap = torch.masked_select((rollout.float() - trainer.float()).abs(), mask.bool())
    if not gap.numel():
        return {}
    return {
        "megatrain/rollout_log_prob_gap_mean": gap.mean().item(),
        "megatrain/rollout_log_prob_gap_max": gap.max().item(),
    }


# ---- hooks ----


def watch_tracking(module: ModuleType) -> None:
    """Wrap `Tracking` of verl.utils.tracking, once."""
    tracking = module.Tracking
    if "megatrain_monitor" in vars(tracking):
        return
    tracking.megatrain_monitor = None
    make, write, finish = tracking.__init__, tracking.log, tracking.finish

    @functools.wraps(make)
    def __init__(self, project_name, experiment_name, default_backend="console", config=None):
        make(self, project_name, experiment_name, default_backend, config)
        self.megatrain_monitor = _start(config)

    @functools.wraps(write)
    def logged(self, data, step, *args, **kwargs):
        monitor = self.megatrain_monitor
        write(self, data if monitor is None else monitor.add(data, step), step, *args, **kwargs)

    @functools.wraps(finish)
    def finished(self, *args, **kwargs):
        if self.megatrain_monitor is not None:
            self.megatrain_monitor.close()
        finish(self, *args, **kwargs)

    tracking.__init__, tracking.log, tracking.finish = __init__, logged, finished


def watch_log_probs(module: ModuleType) -> None:
    """Wrap `calculate_debug_metrics` of verl.utils.debug.metrics, once; before the trainers take it by name."""
    compare = module.calculate_debug_metrics
    if "megatrain" in vars(compare):
        return

    @functools.wraps(compare)
    def calculate_debug_metrics(data, *args, **kwargs) -> dict[str, Any]:
        global _watching
        metrics = compare(data, *args, **kwargs)
        if not _watching:
            return metrics
        try:
            batch = data.batch
            ours = log_prob_gap(batch["rollout_log_probs"], batch["old_log_probs"], batch["response_mask"])
        except Exception:
            _watching = False
            log.warning("the log-prob gap is no longer measured; training goes on", exc_info=True)
            return metrics
        return metrics | ours

    calculate_debug_metrics.megatrain = True
    module.calculate_debug_metrics = calculate_debug_metrics


def watch_startup(module: ModuleType) -> None:
    """Wrap `PPOTrainer` of verl.trainer.ppo.v1.trainer_base, once."""
    trainer = module.PPOTrainer
    if "megatrain_watched" in vars(trainer):
        return
    trainer.megatrain_watched = True
    make = trainer.__init__

    @functools.wraps(make)
    def __init__(self, config, *args, **kwargs):
        global _startup
        try:
            if is_ours(config):
                _startup = MemoryWatch(RunProcesses(), open_gpus()).start()
        except Exception:
            log.warning("memory is not watched before the first step; training goes on", exc_info=True)
        make(self, config, *args, **kwargs)

    trainer.__init__ = __init__


_startup: MemoryWatch | None = None  # of a run that starts in this process; its monitor takes it over
_watching = False  # whether a run of ours is watched from this process


def _start(config: dict[str, Any] | None) -> RunMonitor | None:
    global _startup, _watching
    watch, _startup = _startup, None
    try:
        if not is_ours(config):
            return None
        folder = Path(config["trainer"]["default_local_dir"]) / FOLDER
        monitor = RunMonitor(
            folder,
            watch or MemoryWatch(RunProcesses(), open_gpus()),
            gpu_budget_gb=gpu_budget_gb(config),
            startup_s=startup_times.phases_here(),
        )
    except Exception:
        log.warning("the run is not watched (megatrain/* metrics, run.jsonl); training goes on", exc_info=True)
        if watch is not None:
            watch.stop()
        return None
    _watching = True
    return monitor


def is_ours(config: dict[str, Any] | None) -> bool:
    """Whether VERL's config, of RL or of SFT, asks for strategy megatrain."""
    actor = ((config or {}).get("actor_rollout_ref") or {}).get("actor") or {}
    engine = (config or {}).get("engine") or {}
    return "megatrain" in (actor.get("strategy"), engine.get("strategy"))


def gpu_budget_gb(config: dict[str, Any]) -> float:
    """What is in force in a run of ours; one whose config lacks the setting (model_engine=dp) has the default."""
    actor = (config.get("actor_rollout_ref") or {}).get("actor") or {}
    engine = config.get("engine") or {}
    default = StreamConfig().gpu_budget_gb
    return float((actor.get("megatrain") or {}).get("gpu_budget_gb", engine.get("gpu_budget_gb", default)))
