"""verl_patches/failed_generation.py: what VERL says is still unclear, the patch says what happened, other errors pass."""

import inspect
import types

import pytest
import run_fakes
import verl.trainer.ppo.v1.replay_buffer as patched

from verl_patches import failed_generation


def patched_with(error: Exception):
    return run_fakes.patched(failed_generation, "ReplayBuffer", "sample", error=error)


def test_defect_is_still_there():
    source = inspect.getsource(inspect.unwrap(patched.ReplayBuffer.sample))
    assert "no materializable trajectories" in source and "engine" not in source.split("materializable")[1][:200]
    assert patched.ReplayBuffer.sample.__wrapped__ is not None


def test_failed_answers_are_named():
    buffer = patched_with(
        RuntimeError("Sync replay buffer selected terminal groups with no materializable trajectories.")
    )
    with pytest.raises(
        RuntimeError, match="every answer of this batch failed: the rollout engine has died.*checkpoint"
    ):
        buffer.sample(1, "train", 8)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="^something else$"):
        patched_with(RuntimeError("something else")).sample()


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="ReplayBuffer"):
        failed_generation.apply(types.ModuleType(failed_generation.MODULE))
