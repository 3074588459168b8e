"""When the trainer's process has died, the error says so.

Symptom: the run ends with a page of Ray's about an actor of class `create_colocated_worker_cls.<locals>.WorkerDict`, which names neither the
    trainer nor what to do.
Cause: Ray's error goes up as it is.
Upstream: verl 0.9.1, trainer/ppo/v1/trainer_base.py, PPOTrainer.init and fit. No issue known.
Remove when: the message names the trainer.
"""

from types import ModuleType

from verl_patches.retelling import retold

MODULE = "verl.trainer.ppo.v1.trainer_base"

_WORKER = "WorkerDict"
_INSTEAD = (
    "the trainer's process has died: its own error stands above, or it was killed (the kernel does that when host RAM runs out). "
    "Start the run again to go on from the last checkpoint."
)


def apply(module: ModuleType) -> None:
    from ray.exceptions import ActorDiedError

    trainer = module.PPOTrainer
    for name in ("init", "fit"):
        setattr(trainer, name, retold(getattr(trainer, name), ActorDiedError, told=_WORKER, instead=_INSTEAD))
