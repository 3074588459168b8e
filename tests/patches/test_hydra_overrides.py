"""verl_patches/hydra_overrides.py: Hydra names no known key, the patch does; gate."""

import inspect

import hydra._internal.config_loader_impl as patched
import pytest
from hydra.errors import ConfigCompositionException
from patch_cases import asked, empty
from verl_cases import OURS, composed

from verl_patches import hydra_overrides

WRONG = "actor_rollout_ref.actor.megatrain.rng_depth=3"


def test_defect_is_still_there(monkeypatch):
    loader = patched.ConfigLoaderImpl
    monkeypatch.setattr(loader, "load_configuration", inspect.unwrap(loader.load_configuration))
    with pytest.raises(ConfigCompositionException) as refusal:
        composed(*OURS, WRONG)
    assert "ring_depth" not in str(refusal.value)


def test_patch_mends_it():
    with pytest.raises(ConfigCompositionException, match=r"rng_depth.*ring_depth"):
        composed(*OURS, WRONG)


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="ConfigLoaderImpl"):
        hydra_overrides.apply(empty(hydra_overrides.MODULE), print)


@pytest.mark.parametrize("hydra, applied", [("1.3.2", True), ("1.2.0", False), ("1.4.0.dev1", False), ("2.0", False)])
def test_nothing_outside_the_gate(hydra, applied):
    assert (hydra_overrides.MODULE in asked("0.9.1", **{"hydra-core": hydra})) == applied
