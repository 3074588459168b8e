"""The rollout engine's import goes on while the trainer's process is waited for, and is over before anything else."""

import sys
import threading
import types

import pytest
from omegaconf import OmegaConf

from megatrain_rl.verl_plugin import rollout_import


def config(strategy: str = "megatrain", rollout: str = "vllm"):
    return OmegaConf.create({"actor_rollout_ref": {"actor": {"strategy": strategy}, "rollout": {"name": rollout}}})


class Import:
    """Stands for importing vLLM: begins when asked to, ends when it may."""

    def __init__(self, monkeypatch):
        self.began, self.may_end, self.ended = (threading.Event() for _ in range(3))
        self.names, self.error = [], None
        monkeypatch.setattr(rollout_import.importlib, "import_module", self)

    def __call__(self, name: str):
        assert threading.current_thread() is not threading.main_thread()
        self.names.append(name)
        self.began.set()
        assert self.may_end.wait(20)
        self.ended.set()
        if self.error is not None:
            raise self.error


@pytest.fixture
def importing(monkeypatch):
    return Import(monkeypatch)


def trainer_module(events: list[str], importing: Import, *, fails: bool = False) -> types.ModuleType:
    """VERL's order: workers are made (twice: VERL splits a group), their model is waited for, reward workers are made."""
    module = types.ModuleType("trainer_base")

    class RayWorkerGroup:
        def __init__(self, name):
            events.append(f"group {name}")

    class RewardLoopManager:
        def __init__(self, config=None):
            events.append(f"rewards, imported: {importing.ended.is_set()}")

    class PPOTrainer:
        def __init__(self, config):
            self.config = config

        def _setup(self):
            module.RayWorkerGroup("all")
            module.RayWorkerGroup(name="actor")
            events.append(f"waiting, begun: {importing.began.wait(5 if wanted(self.config) else 0.2)}")
            importing.may_end.set()
            if fails:
                raise ValueError("the trainer's error")
            module.RewardLoopManager(config=self.config)

    wanted = rollout_import.wanted
    module.RayWorkerGroup, module.RewardLoopManager, module.PPOTrainer = RayWorkerGroup, RewardLoopManager, PPOTrainer
    rollout_import.install(module)
    return module


def test_it_is_imported_beneath_the_wait_for_the_trainer(importing):
    events = []
    module = trainer_module(events, importing)
    module.PPOTrainer(config())._setup()
    assert events == ["group all", "group actor", "waiting, begun: True", "rewards, imported: True"]
    assert importing.names == ["verl.workers.rollout.vllm_rollout.vllm_async_server"]


@pytest.mark.parametrize("of", [config(strategy="fsdp"), config(rollout="embedded")])
def test_other_runs_import_nothing(importing, of):
    events = []
    trainer_module(events, importing).PPOTrainer(of)._setup()
    assert events[2:] == ["waiting, begun: False", "rewards, imported: False"] and importing.names == []


def test_an_error_of_the_import_is_left_to_verl(importing):
    importing.error = ImportError("no vllm")
    events = []
    trainer_module(events, importing).PPOTrainer(config())._setup()
    assert events[-1] == "rewards, imported: True"


def test_the_trainers_own_error_is_the_one_that_is_told(importing):
    with pytest.raises(ValueError, match="the trainer's error"):
        trainer_module([], importing, fails=True).PPOTrainer(config())._setup()
    assert importing.ended.is_set()


def test_verls_own_trainer_has_the_calls():
    import verl.trainer.ppo.v1.trainer_base as trainer_base

    for owner, method in (
        (trainer_base.PPOTrainer, "_setup"), (trainer_base.RayWorkerGroup, "__init__"), (trainer_base.RewardLoopManager, "__init__"),
    ):  # fmt: skip
        layers, call = [], vars(owner)[method]
        while call is not None:
            layers.append(call.__code__.co_filename)
            call = getattr(call, "__wrapped__", None)
        assert rollout_import.__file__ in layers, (owner, method)
    assert rollout_import._SERVER not in sys.modules
