"""Phases of the start-up: marked in VERL's own trainer, in order, each once."""

import os
import sys
import time
import types

import pytest

from megatrain_rl.verl_plugin import startup_times

real_time = time.time


def trainer_module() -> types.ModuleType:
    """Classes with the methods that are marked, each advancing a clock by a second of its own."""
    module = types.ModuleType("trainer_base")

    def body(seconds):
        return lambda self: clock.pass_(seconds)

    class RayWorkerGroup:
        __init__ = body(2)

    class RewardLoopManager:
        __init__ = body(4)

    class LLMServerManager:
        @classmethod
        def create(cls):
            clock.pass_(8)
            return cls

    class CheckpointEngineManager:
        __init__ = body(16)

    class PPOTrainer:
        __init__ = body(1)
        on_init_end = body(32)
        fit = body(1000)

        def init(self):
            self._setup()
            self.on_init_end()

        def _setup(self):
            RayWorkerGroup()
            clock.pass_(64)  # the worker loads the model
            RewardLoopManager()
            assert LLMServerManager.create() is LLMServerManager
            CheckpointEngineManager()

    for cls in (RayWorkerGroup, RewardLoopManager, LLMServerManager, CheckpointEngineManager, PPOTrainer):
        setattr(module, cls.__name__, cls)
    return module


class Clock:
    def __init__(self):
        self.now = 1000.0

    def pass_(self, seconds):
        self.now += seconds


clock = Clock()


@pytest.fixture(autouse=True)
def fake_time(monkeypatch):
    monkeypatch.setattr(startup_times.time, "time", lambda: clock.now)
    monkeypatch.delenv(startup_times.STARTED_VARIABLE, raising=False)


def run(module):
    trainer = module.PPOTrainer()
    trainer.init()
    clock.pass_(128)
    trainer.fit()


def test_phases_are_told_once_training_begins(monkeypatch, capsys):
    monkeypatch.setenv(startup_times.STARTED_VARIABLE, str(clock.now - 256))
    module = trainer_module()
    monkeypatch.setitem(sys.modules, startup_times.MODULE, module)
    times = startup_times.install(module)
    assert startup_times.install(module) is times
    run(module)
    assert startup_times.phases_here() == times.phases_s() == {
        "Ray and the task runner": 256, "tokenizer, data": 1, "worker process": 2, "trainer, GPU memory": 64,
        "reward workers": 4, "rollout engine": 8, "rest of the model, checkpoint": 16,
        "rest of the model, first weight sync": 32, "agent workers": 128,
    }  # fmt: skip
    told = capsys.readouterr().out
    assert told.startswith("start-up took 511.0 s: Ray and the task runner 256.0, ") and told.count("start-up") == 1


def test_runs_of_others_are_not_told(capsys):
    module = trainer_module()
    startup_times.install(module)
    run(module)
    assert capsys.readouterr().out == ""


def test_verls_own_trainer_has_the_calls():
    import verl.trainer.ppo.v1.trainer_base as trainer_base

    assert isinstance(trainer_base.megatrain_startup, startup_times.StartupTimes)
    for owner, method, *_ in startup_times._MARKS:
        call = vars(getattr(trainer_base, owner))[method]
        assert hasattr(getattr(call, "__func__", call), "__wrapped__"), (owner, method)
    assert {"_setup", "init"}.isdisjoint(vars(trainer_base.get_trainer_cls("sync"))), "the marks must be reached"


def test_the_driver_notes_when_its_process_began(monkeypatch):
    startup_times.note_start()
    assert 0 < real_time() - float(os.environ[startup_times.STARTED_VARIABLE]) < 3600


def test_missing_call_raises():
    module = trainer_module()
    del module.LLMServerManager
    with pytest.raises(AttributeError, match="LLMServerManager"):
        startup_times.install(module)
