"""verl_patches/reward_values.py with VERL's reward worker and manager: a reward is a finite number, or an error."""

import asyncio
import copy
import inspect
import types

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from patch_cases import OUTSIDE, asked, empty
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from verl_patches import reward_values
from verl_patches.wrap import patches_of


class Tokenizer:
    def decode(self, ids, skip_special_tokens):
        return "an answer"


def answer() -> DataProto:
    tensors = {"responses": torch.ones(1, 2, dtype=torch.long), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    truth = np.array([{"ground_truth": "1"}], dtype=object)
    row = {
        "data_source": np.array(["x"], dtype=object),
        "reward_model": truth,
        "extra_info": np.array([{}], dtype=object),
    }
    return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=row)


def reward(returned, *, strategy: str = "megatrain", patched: bool = True):
    """What the agent loop gets for an answer whose reward function returns this, or raises it."""
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"strategy": strategy}},
            "reward": {"custom_reward_function": {"path": "mine.py"}},
        }
    )

    async def score(**_):
        if isinstance(returned, Exception):
            raise returned
        return copy.copy(returned)

    async def asked_for():
        worker = object.__new__(cls)
        worker.config, worker.reward_manager = config, NaiveRewardManager(config, Tokenizer(), score)
        return await worker.compute_score(answer())

    original = inspect.unwrap(RewardLoopWorker.compute_score)
    cls = type("RewardLoopWorker", (), {"compute_score": original})
    if patched:
        for _ in range(2):
            reward_values.apply(types.SimpleNamespace(RewardLoopWorker=cls))
        assert patches_of(cls.compute_score) == (reward_values.__name__,)
    return asyncio.run(asked_for())


BAD = [None, float("nan"), float("inf"), np.float32("nan"), "1.0", "", [1.0, 2.0], {"score": None}, {"score": "x"}]


@pytest.mark.parametrize("returned", BAD, ids=str)
@pytest.mark.parametrize("how", [{"patched": False}, {"strategy": "fsdp"}], ids=["no patch", "another strategy"])
def test_defect_is_still_there(returned, how):
    given = returned["score"] if isinstance(returned, dict) else returned
    got = reward(returned, **how)["reward_score"]
    assert got is given or got == given or got != got


@pytest.mark.parametrize("returned", BAD, ids=str)
def test_patch_mends_it(returned):
    with pytest.raises(ValueError, match=r"reward.*finite number"):
        reward(returned)


def test_a_dict_without_score_is_told():
    with pytest.raises(ValueError, match="without `score`"):
        reward({"acc": 1.0})


@pytest.mark.parametrize(
    "returned", [1, True, 0.5, np.float32(0.5), np.int64(2), torch.tensor(0.5), {"score": 1, "acc": 0}], ids=str
)
def test_numbers_stay_what_they_are(returned):
    number = returned["score"] if isinstance(returned, dict) else returned
    got = reward(returned)
    assert type(got["reward_score"]) is float and got["reward_score"] == float(number)
    assert "acc" in got["reward_extra_info"]


@pytest.mark.parametrize("error", [KeyError("answer"), RuntimeError("mine")], ids=str)
def test_errors_of_the_function_pass(error):
    with pytest.raises(type(error)) as raised:
        reward(error)
    assert raised.value.args == error.args


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="RewardLoopWorker"):
        reward_values.apply(empty(reward_values.MODULE))


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert reward_values.MODULE not in asked(version) and reward_values.MODULE in asked("0.9.1")
