"""A trainer never sees the name under which the driver selected it; its mode is VERL's own.

Symptom: with `trainer.v1.trainer_mode=megatrain_sync`, which the driver puts there, a trainer of VERL's that is built
    directly takes another replay buffer, another size of generation batches and other checkpoints than in mode `sync`.
Cause: VERL's setting is two things, the name in the registry of trainers and the mode that the trainer works in.
Upstream: verl 0.9.1, trainer/ppo/v1/trainer_base.py:129, PPOTrainer.__init__. No issue known.
Remove when: name and mode are two settings, or a plug-in can put its trainer in the place of VERL's for its own runs.
"""

from types import ModuleType

from verl_patches.ours import TRAINERS
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.trainer.ppo.v1.trainer_base"
VERSIONS = {"verl": TESTED_VERL}


def apply(module: ModuleType) -> None:
    modes = {ours: mode for mode, ours in TRAINERS.items()}

    def make(init, self, config, *args, **kwargs):
        selected = config.trainer.v1.trainer_mode
        if selected in modes:
            config.trainer.v1.trainer_mode = modes[selected]
        init(self, config, *args, **kwargs)

    wrap(module.PPOTrainer, "__init__", make, patch=__name__)
