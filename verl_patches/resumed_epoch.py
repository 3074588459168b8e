"""An SFT run that was saved at the end of an epoch goes on with the next one.

Symptom: resumed at the end of an epoch, a run trains nothing in the epoch that follows. If that was the last, it ends
    with status 0 and without having done its steps.
Cause: the state of the data loader is restored as it was at the end, exhausted, and the loop takes its first pass over
    it for a whole epoch.
Upstream: verl 0.9.1, utils/checkpoint/checkpoint_handler.py:160, trainer/sft_trainer.py:356. No issue known.
Remove when: VERL starts a new pass where the restored one is at its end.
"""

from types import ModuleType

from verl_patches.ours import sft_lives_here
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.utils.checkpoint.checkpoint_handler"
VERSIONS = {"verl": TESTED_VERL}


def apply(module: ModuleType) -> None:
    def load_checkpoint(load, self, *args, **kwargs):
        step = load(self, *args, **kwargs)
        loader = self.train_dataloader
        if sft_lives_here() and step and step % len(loader) == 0:
            # The restored pass is over. A loader begins a new one when it is asked for the next.
            next(iter(loader), None)
        return step

    wrap(module.CheckpointHandler, "load_checkpoint", load_checkpoint, patch=__name__)
