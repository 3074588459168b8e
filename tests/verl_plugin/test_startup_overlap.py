"""What the task runner starts beneath its waits: when it begins, that it is over before anything else, and where its errors are told."""

import sys
import threading
import types

import pytest
from omegaconf import OmegaConf

from megatrain_rl.verl_plugin import startup_overlap
from megatrain_rl.verl_plugin.startup_times import STARTED_VARIABLE


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
    """VERL's order: the queue, the trainer's workers (twice: VERL splits a group), their model is waited for, reward workers are made."""

    def __init__(self, monkeypatch, *, config, trainer_error: Exception | None = None):
        self.events: list[str] = []
        self.server, self.queue = Blocked(), Blocked()
        self.before_the_actor: Exception | None = None  # what `init` fails with, before there is an actor
        monkeypatch.setattr(startup_overlap.importlib, "import_module", self.server)
        monkeypatch.setattr(startup_overlap, "_calls", startup_overlap.BackgroundCalls())
        monkeypatch.setenv(STARTED_VARIABLE, "1000.0")
        self.config, self.trainer_error = config, trainer_error
        self.module = self._module()
        startup_overlap.install(self.module)
        startup_overlap.install(self.module)

    def run(self) -> None:
        tq = self.module.tq
        tq.init("queue's config")
        try:
            self.events.append(f"queue ready: {self.queue.ended.is_set()}")
            self.module.PPOTrainer(self.config)._setup()
        finally:
            tq.close()

    def _module(self) -> types.ModuleType:
        events, this = self.events, self
        interface = types.SimpleNamespace(_TQ_CONTROLLER=None)

        def init(conf=None):
            if this.before_the_actor is not None:
                raise this.before_the_actor
            interface._TQ_CONTROLLER = "actor"
            this.queue(conf)
            return "final"

        class RayWorkerGroup:
            def __init__(self, name):
                events.append(f"group {name}")

        class RewardLoopManager:
            def __init__(self, config=None):
                events.append(f"rewards, ended: {this.queue.ended.is_set()} {this.server.ended.is_set()}")

        class PPOTrainer:
            def __init__(self, config):
                self.config = config

            def _setup(self):
                module.RayWorkerGroup("all")
                module.RayWorkerGroup(name="actor")
                if startup_overlap.wants_vllm(self.config):
                    assert this.server.began.wait(20)
                events.append(f"waiting, ended: {this.queue.ended.is_set()} {this.server.ended.is_set()}")
                this.queue.may_end.set()
                this.server.may_end.set()
                if this.trainer_error is not None:
                    raise this.trainer_error
                module.RewardLoopManager(config=self.config)

        module = types.ModuleType("trainer_base")
        module.tq = types.SimpleNamespace(init=init, close=lambda: events.append("close"), interface=interface)
        module.RayWorkerGroup, module.RewardLoopManager, module.PPOTrainer = (
            RayWorkerGroup,
            RewardLoopManager,
            PPOTrainer,
        )
        return module


def test_both_go_on_beneath_the_wait_for_the_trainer(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config())
    runner.run()
    assert runner.events == [
        "queue ready: False", "group all", "group actor", "waiting, ended: False False", "rewards, ended: True True", "close",
    ]  # fmt: skip
    assert runner.queue.arguments == [("queue's config",)]
    assert runner.server.arguments == [("verl.workers.rollout.vllm_rollout.vllm_async_server",)]


@pytest.mark.parametrize("of", [config(strategy="fsdp"), config(rollout="embedded")])
def test_other_runs_import_no_vllm(monkeypatch, of):
    runner = TaskRunner(monkeypatch, config=of)
    runner.run()
    assert runner.events[-2] == "rewards, ended: True False" and runner.server.arguments == []


def test_the_queue_of_other_runs_starts_as_ever(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config(strategy="fsdp"))
    monkeypatch.delenv(STARTED_VARIABLE)
    runner.queue.may_end.set()
    assert runner.module.tq.init("queue's config") == "final" and runner.queue.ended.is_set()


def test_a_process_that_joins_the_queue_waits_for_it(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config())
    runner.queue.may_end.set()
    assert runner.module.tq.init() == "final" and runner.queue.ended.is_set()


def test_an_error_of_the_import_is_left_to_verl(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config())
    runner.server.error = ImportError("no vllm")
    runner.run()
    assert runner.events[-2] == "rewards, ended: True True"


def test_an_error_of_the_queue_is_told_at_once_or_before_it_is_used(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config())
    runner.before_the_actor = ValueError("no such sampler")
    with pytest.raises(ValueError, match="no such sampler"):
        runner.run()
    assert runner.events == []
    runner = TaskRunner(monkeypatch, config=config())
    runner.queue.error = RuntimeError("no storage")
    with pytest.raises(RuntimeError, match="no storage"):
        runner.run()
    assert runner.events[-1] == "close" and not any("rewards" in event for event in runner.events)


def test_the_trainers_own_error_is_the_one_that_is_told(monkeypatch):
    runner = TaskRunner(monkeypatch, config=config(), trainer_error=ValueError("the trainer's error"))
    runner.queue.error = RuntimeError("no storage")
    with pytest.raises(ValueError, match="the trainer's error"):
        runner.run()
    assert runner.server.ended.is_set() and runner.queue.ended.is_set() and runner.events[-1] == "close"


def test_verls_own_trainer_has_the_calls():
    import verl.trainer.ppo.v1.trainer_base as trainer_base

    for owner, name in (
        (trainer_base.tq, "init"), (trainer_base.tq, "close"), (trainer_base.PPOTrainer, "_setup"),
        (trainer_base.RayWorkerGroup, "__init__"), (trainer_base.RewardLoopManager, "__init__"),
    ):  # fmt: skip
        layers, call = [], vars(owner)[name]
        while call is not None:
            layers.append(call.__code__.co_filename)
            call = getattr(call, "__wrapped__", None)
        assert startup_overlap.__file__ in layers, name
    assert trainer_base.tq.interface._TQ_CONTROLLER is None
    assert startup_overlap._SERVER not in sys.modules
