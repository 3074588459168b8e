"""Overrides of the command line: the error for a misspelt knob names the nearest known one, in RL and in SFT."""

import re

import pytest
from hydra.errors import ConfigCompositionException
from verl_cases import OURS, composed


@pytest.mark.parametrize("sign", ["", "+", "++"])
@pytest.mark.parametrize("node", ["actor", "ref"])
def test_misspelt_knob_names_its_neighbour(sign, node):
    wrong = f"actor_rollout_ref.{node}.megatrain.rng_depth"
    with pytest.raises(ConfigCompositionException, match=rf"{re.escape(wrong)}; .*megatrain\.ring_depth"):
        composed(*OURS, f"{sign}{wrong}=3")


def test_misspelt_knob_in_sft():
    with pytest.raises(ConfigCompositionException, match=r"engine\.ring_depth"):
        composed("engine=megatrain", "engine.rng_depth=3", name="sft_trainer_engine")


@pytest.mark.parametrize("key", ["forward_only=true", "strategy=fsdp", "reference_for_kl_loss=false"])
def test_what_follows_from_other_settings_cannot_be_set(key):
    setting = f"actor_rollout_ref.actor.megatrain.{key}"
    # a known setting, so not the "unknown setting ..." of the tests above
    with pytest.raises(ConfigCompositionException, match=f"^{re.escape(setting.split('=')[0])} "):
        composed(*OURS, setting)
