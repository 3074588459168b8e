"""The model is loaded while VERL goes on: early refusals are raised at once, later errors where the trainer is used."""

import threading

import pytest
import ray
import torch
import verl_cases

from megatrain_rl import trainer as trainer_module
from megatrain_rl.optim import masters
from megatrain_rl.trainer import StreamTrainer
from megatrain_rl.verl_plugin.engine import loading
from megatrain_rl.verl_plugin.engine.engine import MegaTrainEngine


@pytest.fixture
def ray_worker(monkeypatch):
    """This process is a worker of Ray's, as in RL."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)


@pytest.fixture
def held_up(monkeypatch):
    """Loading stops before the first weight until this event is set."""
    event = threading.Event()
    write = masters.write_master
    monkeypatch.setattr(masters, "write_master", lambda *args: (event.wait(60), write(*args)))
    yield event
    event.set()


def test_initialize_returns_before_the_weights_are_read(world, tiny_model, held_up, ray_worker):
    engine = verl_cases.make_engine(tiny_model)
    assert not engine._loading.done()
    waiting = threading.Thread(target=lambda: verl_cases.weights(engine))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "whoever wants weights waits"
    held_up.set()
    waiting.join(60)
    assert not waiting.is_alive() and isinstance(engine.trainer, StreamTrainer)
    assert engine.trainer is engine.trainer


def test_in_sft_nothing_loads_when_verl_s_data_loader_forks(world, tiny_model, held_up):
    """VERL's SFT trainer iterates its DataLoader, and so forks, some time after `initialize`, in the same process."""
    engines = []
    starting = threading.Thread(target=lambda: engines.append(verl_cases.make_engine(tiny_model)))
    starting.start()
    starting.join(0.5)
    assert starting.is_alive()
    held_up.set()
    starting.join(60)
    assert engines[0]._loading.done()


def test_in_sft_an_error_of_loading_ends_the_start(world, tiny_model, monkeypatch):
    monkeypatch.setattr(StreamTrainer, "warm_up", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        verl_cases.make_engine(tiny_model)


def test_what_the_trainer_refuses_is_raised_at_once(world, tiny_model):
    with pytest.raises(ValueError, match="gpu_budget_gb"):
        verl_cases.make_engine(tiny_model, gpu_budget_gb=0.5)


def test_what_the_check_refuses_is_raised_at_once(world, tiny_model, held_up, ray_worker, monkeypatch):
    def refuse(self, trainer):
        raise ValueError(f"no room beside {trainer.plan.pack_tokens} tokens")

    monkeypatch.setattr(MegaTrainEngine, "_check_bucket_fits", refuse)
    with pytest.raises(ValueError, match="no room beside"):
        verl_cases.make_engine(tiny_model)


def test_an_error_of_loading_is_logged_and_raised_where_the_trainer_is_wanted(
    world, tiny_model, held_up, ray_worker, monkeypatch, caplog
):
    engine = verl_cases.make_engine(tiny_model)
    closed = []
    close = StreamTrainer.close
    monkeypatch.setattr(StreamTrainer, "close", lambda self: (closed.append(self), close(self)))
    monkeypatch.setattr(StreamTrainer, "warm_up", lambda self: 1 / 0)
    held_up.set()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            engine.optimizer_step()
    assert len([record for record in caplog.records if record.name == loading.__name__]) == len(closed) == 1


def test_the_second_trainer_plans_when_the_first_has_its_memory(world, tiny_model, held_up, ray_worker, monkeypatch):
    planned = []
    plan = trainer_module.make_plan
    monkeypatch.setattr(trainer_module, "make_plan", lambda *args, **more: (planned.append(1), plan(*args, **more))[1])
    verl_cases.make_engine(tiny_model)
    second = threading.Thread(target=lambda: verl_cases.make_engine(tiny_model))
    second.start()
    second.join(0.5)
    assert second.is_alive() and len(planned) == 1
    held_up.set()
    second.join(60)
    assert not second.is_alive() and len(planned) == 2


def test_the_caller_s_device_is_the_trainer_s(tiny_model, monkeypatch):
    """Threads have a current device each."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def from_pretrained(model_dir, *, on_reserved, device):
        chosen.append(device)
        raise KeyError("far enough")

    monkeypatch.setattr(StreamTrainer, "from_pretrained", from_pretrained)
    with pytest.raises(KeyError):
        loading.load(tiny_model, check=None, device="cuda")
    assert chosen == [5, "cuda"]
