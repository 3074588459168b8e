"""The task runner imports vLLM while it waits for the trainer's process.

VERL imports the server's class there, all of vLLM with it, only to hand its name to Ray: 8 to 20 s in which nothing else goes on, right after
as long a wait for the trainer's process to import and to take its memory. So the import goes on a thread beneath that wait; whatever the
task runner does next comes after it, since two threads that import the same packages can find each other's half made. Installed by
register.py.
"""

import functools
import importlib
import threading
from types import ModuleType

from megatrain_rl.verl_plugin.run_monitor import is_ours

_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"


class RolloutImport:
    """One import of `name`; `start` and `finish` may be called in any order and more than once."""

    def __init__(self, name: str | None = None):
        self.name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.name is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollout import", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            importlib.import_module(self.name)
        except Exception:
            pass  # VERL's own import meets it again, where it can be told


def install(module: ModuleType) -> None:
    """Wrap the calls of verl.trainer.ppo.v1.trainer_base between which the task runner waits for the trainer's process."""
    current = RolloutImport()
    trainer, workers, rewards = module.PPOTrainer, module.RayWorkerGroup, module.RewardLoopManager
    setup, make_workers, make_rewards = trainer._setup, workers.__init__, rewards.__init__

    @functools.wraps(setup)
    def _setup(self, *args, **kwargs):
        nonlocal current
        current = RolloutImport(_SERVER if wanted(self.config) else None)
        try:
            return setup(self, *args, **kwargs)
        finally:
            current.finish()

    @functools.wraps(make_workers)
    def after(self, *args, **kwargs):
        make_workers(self, *args, **kwargs)
        current.start()

    @functools.wraps(make_rewards)
    def before(self, *args, **kwargs):
        current.finish()
        make_rewards(self, *args, **kwargs)

    trainer._setup, workers.__init__, rewards.__init__ = _setup, after, before


def wanted(config) -> bool:
    """Whether this is a run of ours with vLLM."""
    return is_ours(config) and config.actor_rollout_ref.rollout.name == "vllm"
