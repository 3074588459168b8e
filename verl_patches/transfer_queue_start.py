"""TransferQueue starts while VERL's task runner waits for the trainer's process.

Symptom: a run's start waits 24 s (16 cores) for TransferQueue, a controller and then its storage units, before anything
    else begins.
Cause: VERL's task runner asks for it first of all, and uses it last.
Upstream: verl 0.9.1, trainer/main_ppo.py:148, TaskRunnerV1.run. No issue known.
Remove when: VERL starts it beside its other parts.

The start is put off only in the task runner of a run whose trainer is ours. That trainer begins the start, and waits
for its end before the queue is used. A process that joins the queue, and a user's code that uses it early, wait for it
as they would for any start.
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

# The start of this process's queue.
start = Deferred("transfer-queue")


def apply(module: ModuleType) -> None:
    def init(start_now, conf=None):
        if conf is not None and _our_trainer_follows(conf):
            start.put_off(functools.partial(start_now, conf))
            return conf
        start.finish()
        return start_now(conf)

    def client(make_client, conf=None):  # every use of the queue begins with this call
        start.finish()
        return make_client(conf)

    wrap(module, "init", init, patch=__name__)
    wrap(module.interface, "_maybe_create_tq_client", client, patch=__name__)


def _our_trainer_follows(conf: "DictConfig") -> bool:
    """Whether a trainer of ours will use the queue. conf: `transfer_queue` in VERL's config, a node of the whole."""
    from omegaconf import OmegaConf

    return OmegaConf.select(conf._get_root(), "trainer.v1.trainer_mode") in TRAINERS.values()
