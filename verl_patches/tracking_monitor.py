"""VERL's SFT trainer and its older RL trainer log what our monitor measures too.

Symptom: no memory, no wait for the optimizer and no record of a run but in RL by VERL's v1 trainers, where our own trainer takes part.
Cause: these trainers make their logger in the middle of their main method and are no classes that a plug-in may replace.
Upstream: verl 0.9.1, trainer/sft_trainer.py:313, trainer/ppo/ray_trainer.py:1419, utils/tracking.py:61 (`Tracking`). No issue known.
Remove when: VERL's logger takes backends from plug-ins, or its SFT trainer comes from a registry.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_patches.ours import TRAINERS, is_ours
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.utils.tracking"
VERSIONS = {"verl": TESTED_VERL}


def apply(module: ModuleType, attach: Callable[[Any, dict[str, Any]], object]) -> None:
    """attach: called with each logger of a run of ours that no trainer of ours makes, and the run's config."""

    def make(init, self, project_name, experiment_name, default_backend="console", config=None):
        init(self, project_name, experiment_name, default_backend, config)
        if config is not None and is_ours(config) and not _our_trainer_logs(config):
            attach(self, config)

    wrap(module.Tracking, "__init__", make, patch=__name__)


def _our_trainer_logs(config: dict[str, Any]) -> bool:
    trainer = config.get("trainer") or {}
    mode = (trainer.get("v1") or {}).get("trainer_mode")
    return bool(trainer.get("use_v1")) and mode in TRAINERS
