"""verl_patches/replay_buffer_poll.py: defect still there, mended by the patch, nothing else changed."""

import types

import pytest
import verl.trainer.ppo.v1.replay_buffer as patched
from omegaconf import OmegaConf

from verl_patches import replay_buffer_poll

ARGUMENTS = dict(
    trainer_mode="sync",
    trainer_config=OmegaConf.create({}),
    max_off_policy_threshold=1,
    max_off_policy_strategy="drop",
    sampler_kwargs=OmegaConf.create({}),
)


def test_defect_is_still_there():
    buffer = object.__new__(patched.ReplayBuffer)
    patched.ReplayBuffer.__init__.__wrapped__(buffer, **ARGUMENTS)
    assert buffer.poll_interval == 2.0


@pytest.mark.parametrize("cls", ["ReplayBuffer", "ReplayBufferAsync"])
def test_patch_mends_it(cls, monkeypatch):
    slept = []
    monkeypatch.setattr(patched.time, "sleep", slept.append)
    buffer = getattr(patched, cls)(**ARGUMENTS)
    buffer._wait_for_next_poll("train", 0.0)
    assert slept == [replay_buffer_poll.POLL_SECONDS] and slept[0] <= 0.1


def test_an_interval_of_the_callers_is_kept():
    assert patched.ReplayBuffer(**ARGUMENTS, poll_interval=7.0).poll_interval == 7.0


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="ReplayBuffer"):
        replay_buffer_poll.apply(types.ModuleType("verl.trainer.ppo.v1.replay_buffer"))
    module = types.ModuleType("verl.trainer.ppo.v1.replay_buffer")
    module.ReplayBuffer = type("ReplayBuffer", (), {"__init__": lambda self, interval=1: None})
    with pytest.raises(AttributeError, match="poll_interval"):
        replay_buffer_poll.apply(module)
