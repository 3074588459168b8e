"""verl_patches/dead_trainer.py: Ray's page about an actor gets a line that says which and what to do; other errors pass."""

import inspect
import types

import pytest
import run_fakes
import verl.trainer.ppo.v1.trainer_base as patched
from ray.exceptions import ActorDiedError

from verl_patches import dead_trainer


def died(class_name: str) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = f"The actor died unexpectedly before finishing this task.\n\tclass_name: {class_name}"
    return error


def patched_with(error: Exception):
    return run_fakes.patched(dead_trainer, "PPOTrainer", "init", "fit", error=error)


def test_defect_is_still_there():
    for call in (patched.PPOTrainer.init, patched.PPOTrainer.fit):
        assert call.__wrapped__ is not None and "ActorDied" not in inspect.getsource(inspect.unwrap(call))


def test_the_trainer_is_named():
    trainer = patched_with(died("create_colocated_worker_cls.<locals>.WorkerDict"))
    for call in (trainer.init, lambda: trainer.fit("agent loops")):
        with pytest.raises(RuntimeError, match="the trainer's process has died.*host RAM.*last checkpoint") as told:
            call()
        assert isinstance(told.value.__cause__, ActorDiedError)


@pytest.mark.parametrize("error", [died("AgentLoopWorker"), ValueError("WorkerDict")])
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as told:
        patched_with(error).fit()
    assert told.value is error


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="PPOTrainer"):
        dead_trainer.apply(types.ModuleType(dead_trainer.MODULE))
