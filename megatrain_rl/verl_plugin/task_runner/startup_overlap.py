"""What VERL's task runner starts before and after the trainer's process goes on while that process starts.

Every process of a run first imports for 10 to 20 s, and the task runner waits for each in turn. Two of its waits are put beneath the one for
the trainer's process:

- TransferQueue's start, a controller and then its storage units. VERL asks for it first of all, and uses it last.
- The import of the rollout server's class, all of vLLM with it, which VERL does later, only to hand the class to Ray.

Both have ended before the task runner goes on, and the queue before anybody in this process uses it. Only runs whose actor is ours. Installed
by register.py.
"""

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable
from types import ModuleType

from megatrain_rl.watch.monitor import is_ours
from megatrain_rl.verl_plugin.task_runner.startup_times import STARTED_VARIABLE, call_when

_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"


class BackgroundCalls:
    """Calls that are put off, and then made on threads of their own."""

    def __init__(self):
        self._changed = threading.Lock()
        self._waiting: list[Callable[[], object]] = []
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def put_off(self, call: Callable[[], object]) -> None:
        self._waiting.append(call)

    def start(self) -> None:
        """Begin what was put off."""
        with self._changed:
            calls, self._waiting = self._waiting, []
            threads = [threading.Thread(target=self._run, args=(call,), daemon=True) for call in calls]
            self._threads += threads
        for thread in threads:
            thread.start()

    def forget(self) -> None:
        """What was put off and has not begun will not be needed."""
        with self._changed:
            self._waiting = []

    def finish(self) -> None:
        """Until all of them have ended, those not begun included; raises the first error, once. On one of their own threads: nothing."""
        if threading.current_thread() in self._threads:
            return
        self.start()
        for thread in list(self._threads):
            thread.join()
        with self._changed:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self._errors.append(error)


_queue, _server = BackgroundCalls(), BackgroundCalls()  # of this process


def _start() -> None:
    _queue.start()
    _server.start()


def _finish() -> None:
    try:
        _queue.finish()
    finally:
        _server.finish()


def install(module: ModuleType) -> None:
    """Wrap the calls of verl.trainer.ppo.v1.trainer_base, and of the queue that it uses, between which the task runner waits; once."""
    if not hasattr(module, "megatrain_overlap"):
        module.megatrain_overlap = True
        _wrap_queue(module.tq)
        _wrap_trainer(module)


def _wrap_queue(module: ModuleType) -> None:
    init, close, interface = module.init, module.close, module.interface
    make_client = interface._maybe_create_tq_client  # what every use of the queue begins with

    @functools.wraps(init)
    def start(conf=None):
        if conf is not None and STARTED_VARIABLE in os.environ:
            _queue.put_off(functools.partial(init, conf))
            return conf
        _queue.finish()
        return init(conf)

    @functools.wraps(make_client)
    def client(conf=None):
        _queue.finish()
        return make_client(conf)

    @functools.wraps(close)
    def stop():
        _queue.forget()
        with contextlib.suppress(Exception):  # it was or will be told where the run ended
            _queue.finish()
        close()

    module.init, module.close, interface._maybe_create_tq_client = start, stop, client


def _wrap_trainer(module: ModuleType) -> None:
    trainer = module.PPOTrainer
    make, setup = trainer.__init__, trainer._setup

    @functools.wraps(make)
    def __init__(self, config, *args, **kwargs):
        if not is_ours(config):  # another run of a driver that had one of ours
            _queue.finish()
        make(self, config, *args, **kwargs)

    @functools.wraps(setup)
    def _setup(self, *args, **kwargs):
        if wants_vllm(self.config):
            _server.put_off(_import_server)
        try:
            result = setup(self, *args, **kwargs)
        except BaseException:
            _queue.forget()
            _server.forget()
            with contextlib.suppress(Exception):
                _finish()
            raise
        _finish()
        return result

    trainer.__init__, trainer._setup = __init__, _setup
    call_when(module.RayWorkerGroup, "__init__", "ends", _start)
    call_when(module.RewardLoopManager, "__init__", "begins", _finish)


def wants_vllm(config) -> bool:
    """Whether this is a run of ours with vLLM."""
    return is_ours(config) and config.actor_rollout_ref.rollout.name == "vllm"


def _import_server() -> None:
    with contextlib.suppress(Exception):  # VERL's own import meets it again, where it can be told
        importlib.import_module(_SERVER)
