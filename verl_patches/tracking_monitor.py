"""VERL's SFT trainer and its older RL trainer also log what our monitor measures.

Symptom: a run has no figures of memory, no wait for the optimizer and no record, except in RL with VERL's v1 trainers,
    which our own trainer extends.
Cause: these trainers make their logger in the middle of their main method, and a plug-in cannot replace their classes.
Upstream: verl 0.9.1, trainer/sft_trainer.py:313, trainer/ppo/ray_trainer.py:1419, utils/tracking.py:61 (`Tracking`). No
    issue known.
Remove when: VERL's logger takes backends from plug-ins, or its SFT trainer comes from a registry.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_patches.ours import is_ours, trainer_lives_here
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.utils.tracking"
VERSIONS = {"verl": TESTED_VERL}


def apply(module: ModuleType, attach: Callable[[Any, dict[str, Any]], object]) -> None:
    """Have `attach` called with a new logger and its config, in a run of ours whose trainer does not do so itself."""

    def make(init, self, project_name, experiment_name, default_backend="console", config=None):
        init(self, project_name, experiment_name, default_backend, config)
        if is_ours(config) and not trainer_lives_here():
            attach(self, config)

    wrap(module.Tracking, "__init__", make, patch=__name__)
