"""Names that VERL does not know are refused in the driver; what a user has registered is known."""

import sys

import pytest
from verl_cases import OURS, RUN, composed

from megatrain_rl.verl_plugin.driver import algorithm

ACTOR = "actor_rollout_ref.actor"


def check(*overrides: str) -> None:
    algorithm.check_algorithm(composed(*RUN, *OURS, *overrides))


@pytest.mark.parametrize(
    "overrides, setting",
    [
        (["algorithm.adv_estimator=nonsense"], "algorithm.adv_estimator=nonsense.*grpo"),
        (["algorithm.adv_estimator=remax"], "algorithm.adv_estimator=remax"),
        ([f"{ACTOR}.policy_loss.loss_mode=nonsense"], r"policy_loss\.loss_mode=nonsense.*vanilla"),
        ([f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=low_var"], "kl_loss_type=low_var"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k9"], "algorithm.kl_penalty=k9"),
        ([f"{ACTOR}.loss_agg_mode=mean"], "loss_agg_mode=mean"),
        (["actor_rollout_ref.model.external_lib=no_such_module"], r"model\.external_lib=no_such_module"),
    ],
)
def test_names_that_verl_does_not_know(overrides, setting):
    with pytest.raises(ValueError, match=setting):
        check(*overrides)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus"])
def test_verls_estimators(name):
    check(f"algorithm.adv_estimator={name}")


@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3+"])
def test_verls_penalties(name):
    check(f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={name}")


def test_what_is_not_used_is_not_looked_at():
    check(f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.kl_loss_type=low_var")


def test_what_a_user_has_registered(tmp_path, monkeypatch):
    from verl.trainer.ppo import core_algos

    (tmp_path / "my_estimator.py").write_text(
        "from verl.trainer.ppo.core_algos import register_adv_est\n@register_adv_est('mine')\ndef mine(**kwargs):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    check("algorithm.adv_estimator=mine", "actor_rollout_ref.model.external_lib=my_estimator")
    sys.modules.pop("my_estimator")
