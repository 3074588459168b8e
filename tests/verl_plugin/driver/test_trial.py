"""What VERL would refuse in the first step, minutes after the start, is refused in the driver."""

import pytest
from verl.trainer.ppo import core_algos
from verl_cases import OURS, RUN, composed

from megatrain_rl.verl_plugin.driver import algorithm

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
MODE = f"{ACTOR}.policy_loss.loss_mode"


def check(*overrides: str) -> None:
    algorithm.check_algorithm(composed(*RUN, *OURS, *overrides))


# Those that run, with the settings that they need. All others of VERL's are refused.
ESTIMATORS = {
    "grpo": [],
    "grpo_vectorized": [],
    "grpo_passk": ["actor_rollout_ref.rollout.n=2"],
    "rloo": [],
    "rloo_vectorized": [],
    "opo": [],
    "gpg": [],
    "reinforce_plus_plus": [],
    "reinforce_plus_plus_baseline": [],
}


@pytest.mark.parametrize("name", sorted(core_algos.ADV_ESTIMATOR_REGISTRY))
def test_every_estimator_runs_or_is_refused(name):
    if name in ESTIMATORS:
        check(f"algorithm.adv_estimator={name}", *ESTIMATORS[name])
        return
    with pytest.raises(ValueError, match=rf"algorithm\.adv_estimator={name}\b"):
        check(f"algorithm.adv_estimator={name}")


def test_estimators_that_the_v0_trainer_has_data_for():
    keys = ["algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[format,accuracy]"]
    with pytest.raises(ValueError, match=r"algorithm\.adv_estimator=gdpo"):
        check(*keys)  # the v1 trainer takes no such rewards from its batch
    check(*keys, "trainer.use_v1=false")
    check("algorithm.adv_estimator=remax", "trainer.use_v1=false")


def test_pass_at_k_of_one_answer_names_the_number():
    with pytest.raises(ValueError, match=r"grpo_passk.*rollout\.n=1"):
        check("algorithm.adv_estimator=grpo_passk")


@pytest.mark.parametrize("mode", sorted(core_algos.POLICY_LOSS_REGISTRY))
def test_every_loss_mode_passes(mode):
    check(f"{MODE}={mode}", f"{ACTOR}.policy_loss.dro_beta=0.1")


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([f"{MODE}=dro"], "dro_beta"),
        ([f"{ACTOR}.clip_ratio_c=0.5"], "clip_ratio_c"),
        ([f"{MODE}=kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio=-1"], "kl_cov_ratio"),
        ([f"{MODE}=clip_cov", f"{ACTOR}.policy_loss.clip_cov_ratio=0"], "clip_cov"),
        ([f"{MODE}=bypass_mode", f"+{ACTOR}.policy_loss.rollout_correction={{loss_type: nonsense}}"], "nonsense"),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=0"], "loss_scale_factor"),
    ],
)
def test_settings_that_a_loss_refuses(overrides, expected):
    with pytest.raises(ValueError, match=rf"policy_loss\.loss_mode=.*{expected}"):
        check(*overrides)


@pytest.mark.parametrize(
    "settings, expected",
    [
        (["rollout_is=nonsense"], "nonsense"),
        (["rollout_is=token", "rollout_is_threshold=-1"], "rollout_is_threshold"),
        (["rollout_rs=nonsense", "rollout_rs_threshold=0.1"], "nonsense"),
        (["rollout_rs=token_k1"], "rollout_rs_threshold"),
        (["rollout_rs=seq_max_k2", "rollout_rs_threshold='0.5_2'"], "seq_max_k2"),
    ],
)
def test_corrections_that_verl_refuses(settings, expected):
    with pytest.raises(ValueError, match=rf"algorithm\.rollout_correction.*{expected}"):
        check(*(f"{CORRECTION}.{setting}" for setting in settings))


@pytest.mark.parametrize("asked", ["rollout_is=token", "rollout_rs=token_k2", "bypass_mode=true"])
def test_a_correction_without_the_engines_log_probs(asked):
    """VERL leaves the first two out without a word."""
    run = [f"{CORRECTION}.{asked}", f"{CORRECTION}.rollout_rs_threshold=0.5"]
    check(*run)
    key = asked.split("=")[0]
    with pytest.raises(ValueError, match=rf"rollout_correction\.{key}=.*rollout\.calculate_log_probs=true"):
        check(*run, "actor_rollout_ref.rollout.calculate_log_probs=false")


def test_a_users_own_functions_are_not_called(monkeypatch):
    def mine(**_):
        raise AssertionError("called with made-up rows")

    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "mine", mine)
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "mine", mine)
    check("algorithm.adv_estimator=mine", f"{MODE}=mine")
