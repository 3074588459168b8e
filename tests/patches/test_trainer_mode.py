"""verl_patches/trainer_mode.py: a trainer built directly works in another mode without the patch, not with it; gate."""

import inspect
import types

import pytest
from omegaconf import OmegaConf
from patch_cases import OUTSIDE, asked, empty
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_patches import trainer_mode


def config(mode: str):
    return OmegaConf.create({"trainer": {"v1": {"trainer_mode": mode}}})


def mode_of(selected: str, *, patched: bool, by_name: bool = False) -> tuple[str, str]:
    """The mode that VERL's trainer works in, and the one in the config, for what the config selects."""

    class Trainer:
        def __init__(self, config):
            self.trainer_mode = config.trainer.v1.trainer_mode

    module = types.ModuleType(trainer_mode.MODULE)
    module.PPOTrainer = Trainer
    if patched:
        trainer_mode.apply(module)
        trainer_mode.apply(module)
    given = config(selected)
    made = type("OfAUser", (Trainer,), {})(**{"config": given}) if by_name else Trainer(given)
    return made.trainer_mode, given.trainer.v1.trainer_mode


def test_defect_is_still_there():
    source = inspect.getsource(inspect.unwrap(PPOTrainer.__init__))
    assert "self.trainer_mode = self.config.trainer.v1.trainer_mode" in source
    assert 'self.trainer_mode == "sync"' in inspect.getsource(PPOTrainer._build_replay_buffer)
    assert mode_of("megatrain_sync", patched=False) == ("megatrain_sync", "megatrain_sync")


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_patch_mends_it(mode, by_name):
    assert mode_of(f"megatrain_{mode}", patched=True, by_name=by_name) == (mode, mode)


@pytest.mark.parametrize("mode", ["sync", "separate_async", "of a user"])
def test_other_modes_stay(mode):
    assert mode_of(mode, patched=True) == (mode, mode)


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="PPOTrainer"):
        trainer_mode.apply(empty(trainer_mode.MODULE))


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert trainer_mode.MODULE not in asked(version)
    assert trainer_mode.MODULE in asked("0.9.1")
