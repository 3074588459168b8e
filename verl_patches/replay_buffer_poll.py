"""Samples are taken when they are there, not up to two seconds later.

Symptom: generation takes 2.0 s a step (`timing_s/gen`) however little is generated, and at larger sizes up to 2 s too long.
Cause: the replay buffer looks for finished samples, sleeps `poll_interval`, and looks again; the trainer leaves it at its default of
    2.0 s and no setting reaches it. A look costs milliseconds.
Upstream: verl 0.9.1, trainer/ppo/v1/replay_buffer.py:144 and :409. No issue known.
Remove when: VERL has a setting for it, or is told of finished samples.

Only the default changes: an interval given by the caller, and a buffer class of the user's own, are left alone.
"""

import functools
import inspect
from types import ModuleType

MODULE = "verl.trainer.ppo.v1.replay_buffer"

POLL_SECONDS = 0.05


def apply(module: ModuleType) -> None:
    init = module.ReplayBuffer.__init__
    if "poll_interval" not in inspect.signature(init).parameters:
        raise AttributeError(f"{MODULE}.ReplayBuffer.__init__ has no poll_interval: this patch no longer fits VERL")

    @functools.wraps(init)
    def __init__(self, *args, **kwargs) -> None:
        bound = inspect.signature(init).bind(self, *args, **kwargs)
        init(self, *args, **kwargs)
        if "poll_interval" not in bound.arguments:
            self.poll_interval = POLL_SECONDS

    module.ReplayBuffer.__init__ = __init__
