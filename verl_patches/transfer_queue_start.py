"""TransferQueue starts beneath the wait for the trainer's process.

Symptom: a run's start waits 24 s (16 cores) for TransferQueue, a controller and then its storage units, before anything else begins.
Cause: VERL's task runner asks for it first of all, and uses it last.
Upstream: verl 0.9.1, trainer/main_ppo.py:148, TaskRunnerV1.run. No issue known.
Remove when: VERL starts it beside its other parts.

Only the start by the task runner of a run whose trainer is ours is put off: that trainer begins it, and has it end before the queue is used.
A process that joins the queue, and a user's code that uses it early, wait for it as they would for any start.
"""

import functools
from types import ModuleType
from typing import TYPE_CHECKING

from verl_patches.deferred import Deferred
from verl_patches.ours import TRAINERS
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "transfer_queue"
VERSIONS = {"verl": TESTED_VERL, "TransferQueue": ">=0.1.10,<0.2"}

if TYPE_CHECKING:
    from omegaconf import DictConfig

start = Deferred("transfer-queue")  # of this process's queue


def apply(module: ModuleType) -> None:
    def init(start_now, conf=None):
        if conf is not None and _our_trainer_follows(conf):
            start.put_off(functools.partial(start_now, conf))
            return conf
        start.finish()
        return start_now(conf)

    def client(make_client, conf=None):  # what every use of the queue begins with
        start.finish()
        return make_client(conf)

    wrap(module, "init", init, patch=__name__)
    wrap(module.interface, "_maybe_create_tq_client", client, patch=__name__)


def _our_trainer_follows(conf: "DictConfig") -> bool:
    """conf: `transfer_queue` of VERL's config, and so a node of it."""
    from omegaconf import OmegaConf

    return OmegaConf.select(conf._get_root(), "trainer.v1.trainer_mode") in TRAINERS.values()
