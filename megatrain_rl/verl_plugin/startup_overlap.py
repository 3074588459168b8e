"""What VERL's task runner starts one after the other, goes on at the same time where neither needs the other.

Every process of a run first imports for 10 to 20 s, and the task runner waits for each in turn. Two of these waits are put beneath others:

- TransferQueue starts a controller, then its storage (two processes, one after the other); meanwhile data are read and the trainer's process
  is made. Its actor has its name before `init` goes on by itself, so other processes find it, and wait until it is ready.
- VERL imports the rollout server's class, all of vLLM with it, only to hand its name to Ray; meanwhile the trainer's process imports and
  takes its memory.

Both have ended before the task runner does anything after that: it may use the queue then, and two threads that import the same packages
can find each other's half made. Only runs whose actor is ours. Installed by register.py.
"""

import contextlib
import functools
import importlib
import os
import threading
import time
from collections.abc import Callable
from types import ModuleType

from megatrain_rl.verl_plugin.run_monitor import is_ours
from megatrain_rl.verl_plugin.startup_times import STARTED_VARIABLE

_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"


class BackgroundCalls:
    """Calls on threads of their own."""

    def __init__(self):
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, call: Callable[[], object], name: str) -> threading.Thread:
        def run() -> None:
            try:
                call()
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def finish(self) -> None:
        """Wait for all of them; raises the first error, once."""
        while self._threads:
            self._threads.pop().join()
        if self._errors:
            error, self._errors = self._errors[0], []
            raise error


_calls = BackgroundCalls()  # of this process


def install(module: ModuleType) -> None:
    """Wrap the calls of verl.trainer.ppo.v1.trainer_base, and of the queue that it uses, between which the task runner waits; once."""
    if not hasattr(module, "megatrain_overlap"):
        module.megatrain_overlap = True
        _wrap_queue(module.tq)
        _wrap_trainer(module)


def _wrap_queue(module: ModuleType) -> None:
    init, close, interface = module.init, module.close, module.interface

    @functools.wraps(init)
    def start(conf=None):
        if conf is None or STARTED_VARIABLE not in os.environ:
            return init(conf)
        thread = _calls.start(functools.partial(init, conf), "transfer queue")
        while thread.is_alive() and interface._TQ_CONTROLLER is None:
            time.sleep(0.01)
        if not thread.is_alive():
            _calls.finish()
        return conf

    @functools.wraps(close)
    def stop():
        with contextlib.suppress(Exception):  # it was or will be told where the run ended
            _calls.finish()
        close()

    module.init, module.close = start, stop


def _wrap_trainer(module: ModuleType) -> None:
    trainer, workers, rewards = module.PPOTrainer, module.RayWorkerGroup, module.RewardLoopManager
    setup, make_workers, make_rewards = trainer._setup, workers.__init__, rewards.__init__
    wanted = False  # by a set-up that has come to no workers yet

    @functools.wraps(setup)
    def _setup(self, *args, **kwargs):
        nonlocal wanted
        wanted = wants_vllm(self.config)
        try:
            result = setup(self, *args, **kwargs)
        except BaseException:
            with contextlib.suppress(Exception):
                _calls.finish()
            raise
        _calls.finish()
        return result

    @functools.wraps(make_workers)
    def after(self, *args, **kwargs):
        nonlocal wanted
        make_workers(self, *args, **kwargs)
        if wanted:  # VERL makes a second group out of the first
            wanted = False
            _calls.start(_import_server, "rollout import")

    @functools.wraps(make_rewards)
    def before(self, *args, **kwargs):
        _calls.finish()
        make_rewards(self, *args, **kwargs)

    trainer._setup, workers.__init__, rewards.__init__ = _setup, after, before


def wants_vllm(config) -> bool:
    """Whether this is a run of ours with vLLM."""
    return is_ours(config) and config.actor_rollout_ref.rollout.name == "vllm"


def _import_server() -> None:
    with contextlib.suppress(Exception):  # VERL's own import meets it again, where it can be told
        importlib.import_module(_SERVER)
