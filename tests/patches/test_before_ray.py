"""verl_patches/before_ray.py: VERL's own check lets through what a strategy cannot do; ours goes first; gate."""

import inspect
import types

import pytest
import verl.utils.config as patched
from patch_cases import OUTSIDE, asked, empty
from verl_cases import OURS, RUN, composed, validate

from verl_patches import before_ray

TWO_GPUS = (*OURS, "trainer.n_gpus_per_node=2")


def test_defect_is_still_there():
    config = composed(*RUN, *TWO_GPUS)
    inspect.unwrap(patched.validate_config)(config, use_reference_policy=False, use_critic=False)


def test_patch_mends_it():
    with pytest.raises(ValueError, match=r"trainer\.n_gpus_per_node"):
        validate(*TWO_GPUS)


def test_ours_goes_first_and_verls_follows():
    calls = []
    module = types.ModuleType(before_ray.MODULE)
    module.validate_config = lambda config, use_critic: calls.append(("verl", config, use_critic))
    for _ in range(2):
        before_ray.apply(module, lambda config: calls.append(("ours", config)))
    module.validate_config("config", use_critic=False)
    assert calls == [("ours", "config"), ("verl", "config", False)]


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="validate_config"):
        before_ray.apply(empty(before_ray.MODULE), print)


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert before_ray.MODULE not in asked(version)
    assert before_ray.MODULE in asked("0.9.1")
