"""When the trainer's process has died, the error says so.

Symptom: the run ends with a page of Ray's about an actor of class `create_colocated_worker_cls.<locals>.WorkerDict`, which names neither the
    trainer nor what to do.
Cause: Ray's error goes up as it is.
Upstream: verl 0.9.1, trainer/ppo/v1/trainer_base.py, PPOTrainer.fit. No issue known.
Remove when: the message names the trainer.
"""

import functools
from types import ModuleType

MODULE = "verl.trainer.ppo.v1.trainer_base"

_WORKER = "WorkerDict"


def apply(module: ModuleType) -> None:
    fit = module.PPOTrainer.fit

    @functools.wraps(fit)
    def named(self, *args, **kwargs):
        from ray.exceptions import RayActorError

        try:
            return fit(self, *args, **kwargs)
        except RayActorError as error:
            if _WORKER not in str(error):
                raise
            raise RuntimeError(
                "the trainer's process has died: its own error stands above, or somebody killed it (the kernel does when host RAM runs out: "
                "lower actor_rollout_ref.actor.megatrain.host_budget_gb). Start the run again to go on from the last checkpoint."
            ) from error

    module.PPOTrainer.fit = named
