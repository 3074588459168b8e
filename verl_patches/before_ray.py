"""A run of ours is checked, and its open settings are filled in, before Ray starts.

Symptom: a setting that the strategy does not support, or cannot work out itself, fails minutes later in one of Ray's
    processes, with a page of Ray's text.
Cause: VERL's mains check the config in `validate_config`, in the driver and before anything is built. A plug-in has no
    hook there.
Upstream: verl 0.9.1, trainer/main_ppo.py:176 and main_ppo_v0.py (`validate_config`), utils/config.py:71. No issue
    known.
Remove when: VERL asks an engine, or a plug-in, to check the config of a run.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.utils.config"
VERSIONS = {"verl": TESTED_VERL}


def apply(module: ModuleType, prepare: Callable[[Any], None]) -> None:
    """Have `prepare` called with the config of every run, ahead of VERL's own check.

    `prepare` has to leave runs of other strategies alone.
    """

    def validate_config(validate, config, *args, **kwargs):
        prepare(config)
        return validate(config, *args, **kwargs)

    wrap(module, "validate_config", validate_config, patch=__name__)
