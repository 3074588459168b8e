"""What the task runner starts beneath its waits: when it begins, that it is over before anything else, and where its errors are told."""

import inspect
import sys
import threading
import types

import pytest
from omegaconf import OmegaConf

from megatrain_rl.verl_plugin import startup_overlap
from megatrain_rl.verl_plugin.task_runner.startup_times import STARTED_VARIABLE


def config(strategy: str = "megatrain", rollout: str = "vllm"):
    return OmegaConf.create({"actor_rollout_ref": {"actor": {"strategy": strategy}, "rollout": {"name": rollout}}})


class Blocked:
    """Something that takes long: begins when it is called, ends when it may."""

    def __init__(self):
        self.began, self.may_end, self.ended = (threading.Event() for _ in range(3))
        self.arguments, self.error = [], None

    def __call__(self, *arguments):
        self.arguments.append(arguments)
        self.began.set()
        assert self.may_end.wait(20)
        self.ended.set()
        if self.error is not None:
            raise self.error


class TaskRunner:
    """VERL's order: the queue, data, the trainer's workers (twice: VERL splits a group), their model is waited for, reward workers."""

    def __init__(
        self,
        monkeypatch,
        *,
        config,
        trainer_error: Exception | None = None,
        uses_queue_early: bool = False,
        data_error: Exception | None = None,
    ):
        self.events: list[str] = []
        self.server, self.queue = Blocked(), Blocked()
        monkeypatch.setattr(startup_overlap.importlib, "import_module", self.server)
        for calls in ("_queue", "_server"):
            monkeypatch.setattr(startup_overlap, calls, startup_overlap.BackgroundCalls())
        monkeypatch.setenv(STARTED_VARIABLE, "1000.0")
        self.data_error = data_error
        self.config, self.trainer_error, self.uses_queue_early = config, trainer_error, uses_queue_early
        self.module = self._module()
        startup_overlap.install(self.module)
        startup_overlap.install(self.module)

    def run(self) -> None:
        tq = self.module.tq
        tq.init("queue's config")
        try:
            self.module.PPOTrainer(self.config)._setup()
        finally:
            tq.close()

    def state(self) -> str:
        names = {"queue": self.queue, "server": self.server}
        return ", ".join(
            f"{name} {'ended' if it.ended.is_set() else 'begun' if it.began.is_set() else 'not begun'}"
            for name, it in names.items()
        )

    def _module(self) -> types.ModuleType:
        events, this = self.events, self

        def init(conf=None):
            this.queue(conf)
            interface._maybe_create_tq_client(conf)
            return "final"

        def close():
            events.append(f"close: {this.state()}")

        interface = types.SimpleNamespace(_maybe_create_tq_client=lambda conf=None: "client")

        class RayWorkerGroup:
            def __init__(self, name):
                events.append(f"group {name}")

        class RewardLoopManager:
            def __init__(self, config=None):
                events.append(f"rewards: {this.state()}")

        class PPOTrainer:
            def __init__(self, config):
                self.config = config

            def _setup(self):
                events.append(f"data: {this.state()}")
                if this.data_error is not None:
                    raise this.data_error
                if this.uses_queue_early:
                    this.queue.may_end.set()
                    assert interface._maybe_create_tq_client() == "client"
                    events.append(f"used: {this.state()}")
                module.RayWorkerGroup("all")
                module.RayWorkerGroup(name="actor")
                assert this.queue.began.wait(20)
                if startup_overlap.wants_vllm(self.config):
                    assert this.server.began.wait(20)
                events.append(f"model: {this.state()}")
                this.queue.may_end.set()
                this.server.may_end.set()
                if this.trainer_error is not None:
                    raise this.trainer_error
                module.RewardLoopManager(config=self.config)

        module = types.ModuleType("trainer_base")
        module.tq = types.SimpleNamespace(init=init, close=close, interface=interface)
        module.RayWorkerGroup, module.PPOTrainer = RayWorkerGroup, PPOTrainer
        module.RewardLoopManager = RewardLoopManager
        return module


def test_both_go_on_beneath_the_wait_for_the_trainer(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config())
    runner.run()
    assert runner.events == [
        "data: queue not begun, server not begun", "group all", "group actor", "model: queue begun, server begun",
        "rewards: queue ended, server ended", "close: queue ended, server ended",
    ]  # fmt: skip
    assert runner.queue.arguments == [("queue's config",)]
    assert runner.server.arguments == [("verl.workers.rollout.vllm_rollout.vllm_async_server",)]


def test_a_run_without_vllm_imports_none(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config(rollout="embedded"))
    runner.run()
    assert runner.events[-2] == "rewards: queue ended, server not begun"


def test_the_queue_of_other_runs_starts_as_ever(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config(strategy="fsdp"))
    runner.queue.may_end.set()
    monkeypatch.delenv(STARTED_VARIABLE)
    assert runner.module.tq.init("queue's config") == "final" and runner.queue.ended.is_set()


def test_another_run_of_a_driver_that_had_one_of_ours(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config(strategy="fsdp"))
    runner.queue.may_end.set()
    runner.run()
    assert runner.events[0] == "data: queue ended, server not begun"


def test_who_uses_the_queue_early_waits_for_it(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config(), uses_queue_early=True)
    runner.run()
    assert runner.events[:2] == ["data: queue not begun, server not begun", "used: queue ended, server not begun"]
    assert len(runner.queue.arguments) == 1


def test_a_process_that_joins_the_queue_does_so_at_once(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config())
    runner.queue.may_end.set()
    assert runner.module.tq.init() == "final" and runner.queue.ended.is_set()


def test_an_error_of_the_import_is_left_to_verl(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config())
    runner.server.error = ImportError("no vllm")
    runner.run()
    assert runner.events[-2] == "rewards: queue ended, server ended"


@pytest.mark.parametrize("uses_queue_early", [False, True])
def test_an_error_of_the_queue_is_told_before_it_is_used(monkeypatch, uses_queue_early):
    runner = TaskRunner(monkeypatch, config=config(rollout="embedded"), uses_queue_early=uses_queue_early)
    runner.queue.error = RuntimeError("no storage")
    with pytest.raises(RuntimeError, match="no storage"):
        runner.run()
    assert runner.events[-1].startswith("close") and not any("used" in e or "rewards" in e for e in runner.events)


def test_the_trainers_own_error_is_the_one_that_is_told(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config(), trainer_error=ValueError("the trainer's error"))
    runner.queue.error = RuntimeError("no storage")
    with pytest.raises(ValueError, match="the trainer's error"):
        runner.run()
    assert runner.events[-1] == "close: queue ended, server ended"


def test_an_error_before_the_wait_starts_nothing(monkeypatch):
    """It is told at once, not after 20 s of importing what nobody will use."""
    runner = TaskRunner(monkeypatch, config=config(), data_error=ValueError("no such file"))
    with pytest.raises(ValueError, match="no such file"):
        runner.run()
    assert runner.events == ["data: queue not begun, server not begun", "close: queue not begun, server not begun"]


def test_verls_own_trainer_has_the_calls():
    import verl.trainer.ppo.v1.trainer_base as trainer_base

    for owner, name in (
        (trainer_base.tq, "init"), (trainer_base.tq, "close"), (trainer_base.tq.interface, "_maybe_create_tq_client"),
        (trainer_base.PPOTrainer, "__init__"), (trainer_base.PPOTrainer, "_setup"),
        (trainer_base.RayWorkerGroup, "__init__"), (trainer_base.RewardLoopManager, "__init__"),
    ):  # fmt: skip
        files, call = [], vars(owner)[name]
        while call is not None:
            held = [cell.cell_contents for cell in call.__closure__ or ()]  # what `call_when` was given, say
            files += [f.__code__.co_filename for f in (call, *filter(inspect.isfunction, held))]
            call = getattr(call, "__wrapped__", None)
        assert startup_overlap.__file__ in files, name
    assert startup_overlap._SERVER not in sys.modules
