"""Reference log-probs come from the actor's engine: VERL would build a second one, the driver has it ask the first."""

import pytest
from verl.trainer.main_ppo_v0 import BaseTaskRunner
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import get_trainer_cls
from verl_cases import DP, OURS, RUN, composed, validate

from megatrain_rl.verl_plugin.config import REFERENCE_MARKER

KL = "actor_rollout_ref.actor.use_kl_loss=true"


def roles(config) -> set:
    """The worker roles that VERL's v1 and v0 trainers would start; they must agree."""
    sync = get_trainer_cls("sync")
    v1 = sync.__new__(sync)
    v1.config = config
    v1._init_resource_pool_mgr()
    v0 = BaseTaskRunner()
    v0.add_actor_rollout_worker(config)
    assert set(v0.role_worker_mapping) == set(v1.role_worker_mapping)
    return set(v1.role_worker_mapping)


def test_verl_alone_would_build_a_second_engine():
    assert roles(composed(*RUN, *DP, KL)) == {Role.ActorRolloutRef}


@pytest.mark.parametrize("kl", [KL, "algorithm.use_kl_in_reward=true"])
def test_the_driver_has_verl_ask_the_actor(kl):
    config = validate(*DP, kl)
    assert config.actor_rollout_ref.model.lora_adapter_path == REFERENCE_MARKER
    assert roles(config) == {Role.ActorRollout}


def test_no_reference_without_a_kl_term():
    assert validate(*DP).actor_rollout_ref.model.lora_adapter_path is None


def test_reference_of_another_strategy_is_left_alone():
    config = validate(DP[0], "actor_rollout_ref.ref.strategy=fsdp", KL, "trainer.device=cpu")
    assert roles(config) == {Role.ActorRolloutRef}


def test_model_engine_does_so_itself_and_null_asks_for_a_separate_reference():
    assert roles(composed(*RUN, *OURS, KL)) == {Role.ActorRollout}
    separate = validate(*OURS, KL, "actor_rollout_ref.model.lora_adapter_path=null", "trainer.device=cpu")
    assert roles(separate) == {Role.ActorRolloutRef}
