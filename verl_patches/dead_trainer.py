"""When the trainer's process has died, the error says so.

Symptom: the run ends with a page of Ray's about an actor of class `create_colocated_worker_cls.<locals>.WorkerDict`, which names neither the
    trainer nor what to do.
Cause: Ray's error goes up as it is.
Upstream: verl 0.9.1, trainer/ppo/v1/trainer_base.py, PPOTrainer.init and fit. No issue known.
Remove when: the message names the trainer.
"""

import functools
from collections.abc import Callable
from types import ModuleType

MODULE = "verl.trainer.ppo.v1.trainer_base"

_WORKER = "WorkerDict"


def apply(module: ModuleType) -> None:
    trainer = module.PPOTrainer
    trainer.init, trainer.fit = _named(trainer.init), _named(trainer.fit)


def _named(call: Callable) -> Callable:
    @functools.wraps(call)
    def named(self, *args, **kwargs):
        from ray.exceptions import ActorDiedError

        try:
            return call(self, *args, **kwargs)
        except ActorDiedError as error:
            if _WORKER not in str(error):
                raise
            raise RuntimeError(
                "the trainer's process has died: its own error stands above, or it was killed (the kernel does that when host RAM runs out). "
                "Start the run again to go on from the last checkpoint."
            ) from error

    return named
