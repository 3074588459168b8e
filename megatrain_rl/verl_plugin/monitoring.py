"""A RunMonitor behind VERL's logger (`Tracking`) adds the metrics that VERL lacks and writes the run's record.

`attach` is called in the process that logs: by our trainer in RL (task_runner/trainer.py), by a patch in SFT and in
VERL's older trainer (verl_patches/tracking_monitor.py). The record's folder is `trainer.default_local_dir`/megatrain.
Invariant: no error in here stops a training.

VERL itself logs the seconds of stages (timing_s/*) and tokens/s without padding (perf/throughput); neither is repeated
under another name.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain_rl.config import StreamConfig
from megatrain_rl.watch import report
from megatrain_rl.watch.memory import MemoryWatch, open_gpus
from megatrain_rl.watch.monitor import RunMonitor
from megatrain_rl.watch.processes import RunProcesses
from verl_patches import ours

log = logging.getLogger(__name__)

FOLDER = "megatrain"
# The engine's metrics in seconds since the start (engine/engine.py), and the names of their differences per step.
_WAITED = {
    "actor/optimizer_wait_s/max": report.OPTIMIZER_WAIT,
    "actor/weight_sync_wait_s/max": report.SYNC_WAIT,
}
# VERL's stages in the order of a step. `testing` and the dump come after what VERL calls the step.
_STAGES = report.Stages(
    in_step={
        "gen": "generate", "reward": "reward", "old_log_prob": "old_log_prob", "ref": "reference", "values": "values",
        "adv": "adv", "update_critic": "update_critic", "update_actor": "update", "save_checkpoint": "save_checkpoint",
        "update_weights": "weight sync",
    },
    after_step={"testing": "testing", "dump_rollout_generations": "dump_rollout_generations"},
)  # fmt: skip
# One of these marks what is logged of a training step, in RL and in SFT; validation is logged by itself too
_STEP_KEYS = ("training/global_step", "train/loss")

_compares = False  # whether a run that is watched logs in this process


class StepLog:
    """Hands each step that VERL logs to a RunMonitor, and adds the monitor's metrics to it."""

    def __init__(self, monitor: RunMonitor):
        self._monitor = monitor
        self._readable = True
        self._waited_s = dict.fromkeys(_WAITED, 0.0)

    def add(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """The metrics to log instead of `data`: the same and ours. After an error, `data` as it was given."""
        if not self._readable:
            return data
        try:
            waits_s = {}
            for reported, name in _WAITED.items():
                if reported in data:
                    waited_s = float(data[reported])
                    waits_s[name] = waited_s - self._waited_s[reported]
                    self._waited_s[reported] = waited_s
            stages_s = {key.removeprefix("timing_s/"): float(data[key]) for key in data if key.startswith("timing_s/")}
        except Exception:
            self._readable = False
            self._monitor.give_up()
            return data
        trains = any(key in data for key in _STEP_KEYS)
        ours = self._monitor.observe(step, trains=trains, stages_s=stages_s, metrics=waits_s)
        if ours is None:
            return data
        return {key: value for key, value in data.items() if key not in _WAITED} | ours

    def close(self) -> None:
        self._monitor.close()


def watch_memory() -> MemoryWatch:
    """Begin to sample the memory of this run's processes and GPU."""
    return _memory_watch().start()


def _memory_watch() -> MemoryWatch:
    return MemoryWatch(RunProcesses(), open_gpus())


def attach(
    tracking: Any,
    config: Mapping[str, Any],
    *,
    watch: MemoryWatch | None = None,
    startup_s: dict[str, float] | None = None,
) -> bool:
    """Put a RunMonitor behind `tracking`, a logger of VERL's. Returns whether that worked; a failure is only logged.

    config: VERL's config with every value resolved. watch: the sampling that goes on; with None it begins here.
    """
    global _compares
    try:
        monitor = RunMonitor(
            Path(config["trainer"]["default_local_dir"]) / FOLDER,
            watch or _memory_watch(),  # which the monitor starts once its record is open
            gpu_budget_gb=gpu_budget_gb(config),
            engine=engine_share(config),
            startup_s=startup_s,
            stages=_STAGES,
        )
    except Exception:
        log.warning("the run is not watched (megatrain/* metrics, run.jsonl); training goes on", exc_info=True)
        if watch is not None:
            watch.stop()
        return False
    _compares = True
    # The object gets a class of its own. Methods set on the object would refer back to it and so form a cycle, but
    # VERL's logger finishes when the last reference to it goes.
    tracking.step_log = StepLog(monitor)
    tracking.__class__ = _watched(type(tracking))
    return True


def _watched(tracking: type) -> type:
    class WatchedTracking(tracking):
        def log(self, data, step, *args, **kwargs):
            super().log(self.step_log.add(data, step), step, *args, **kwargs)

        def finish(self, *args, **kwargs):
            self.step_log.close()
            super().finish(*args, **kwargs)

    return WatchedTracking


def gpu_budget_gb(config: Mapping[str, Any]) -> float:
    """The GPU budget of a run of ours in GB. A config without the setting (model_engine=dp) has the default."""
    actor = (config.get("actor_rollout_ref") or {}).get("actor") or {}
    engine = config.get("engine") or {}
    default = StreamConfig().gpu_budget_gb
    return float((actor.get("megatrain") or {}).get("gpu_budget_gb", engine.get("gpu_budget_gb", default)))


def engine_share(config: Mapping[str, Any]) -> report.EngineShare | None:
    """The share of the GPU that the driver gave the rollout engine (driver/gpu_share.py); None if it divided none."""
    rollout = (config.get("actor_rollout_ref") or {}).get("rollout") or {}
    plan = ours.rollout_plan(rollout.get("custom"))
    if not plan:
        return None
    return report.EngineShare(share_gb=plan["engine_share_gb"], beyond_gb=plan["engine_beyond_share_gb"])


def log_prob_gap(rollout: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, float]:
    """The mean and the largest |log-prob by the rollout - log-prob by the trainer| over response tokens, in nats.

    All three are (B, T): rows, tokens of a response. mask: 1 at response tokens. Empty if the mask is all 0.
    """
    gap = torch.masked_select((rollout.float() - trainer.float()).abs(), mask.bool())
    if not gap.numel():
        return {}
    return {
        "megatrain/rollout_log_prob_gap_mean": gap.mean().item(),
        "megatrain/rollout_log_prob_gap_max": gap.max().item(),
    }


def compare(data: Any) -> dict[str, float]:
    """Metrics to add where VERL compares rollout and trainer (verl_patches/log_prob_gap.py); empty in runs of others.

    VERL itself logs the gap between probabilities, in which that of unlikely tokens cannot be seen.
    """
    global _compares
    if not _compares:
        return {}
    try:
        batch = data.batch
        return log_prob_gap(batch["rollout_log_probs"], batch["old_log_probs"], batch["response_mask"])
    except Exception:
        _compares = False
        log.warning("the log-prob gap is no longer measured; training goes on", exc_info=True)
        return {}
