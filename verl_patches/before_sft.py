"""An SFT run of ours is checked, and its open settings are filled in, before anything is built.

Symptom: an SFT run whose `trainer.total_training_steps` exceeds its epochs ends early without saving its last steps,
    and the learning rate has not come to its end; a wrong path is told by a page of text.
Cause: the epochs bound VERL's loop, and only its last step is saved. Its SFT mains check no config.
Upstream: verl 0.9.1, trainer/sft_trainer.py:356 and :464 (the mains call `auto_set_device(config)` first). No issue
    known.
Remove when: VERL asks an engine, or a plug-in, to check the config of an SFT run.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_patches import ours
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.utils.device"
VERSIONS = {"verl": TESTED_VERL}


def apply(module: ModuleType, prepare: Callable[[Any], None]) -> None:
    """Have `prepare` called with the config of every SFT run of ours, ahead of everything else."""

    def auto_set_device(function, config, *args, **kwargs):
        if "engine" in ours.our_roles(config):
            ours.note_sft_run()
            prepare(config)
        return function(config, *args, **kwargs)

    wrap(module, "auto_set_device", auto_set_device, patch=__name__)
