"""Names that VERL does not know are refused in the driver; what a user has registered is known."""

import sys

import pytest
from verl_cases import OURS, RUN, composed

from megatrain_rl.verl_plugin.driver import algorithm, names

ACTOR = "actor_rollout_ref.actor"


def check(*overrides: str) -> None:
    config = composed(*RUN, *OURS, *overrides)
    names.check_parts(config)
    algorithm.check_algorithm(config)


@pytest.mark.parametrize(
    "overrides, setting",
    [
        (["algorithm.adv_estimator=nonsense"], "algorithm.adv_estimator=nonsense.*grpo"),
        (["algorithm.adv_estimator=remax"], "algorithm.adv_estimator=remax"),
        ([f"{ACTOR}.policy_loss.loss_mode=nonsense"], r"policy_loss\.loss_mode=nonsense.*vanilla"),
        ([f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=low_var"], "kl_loss_type=low_var"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k9"], "algorithm.kl_penalty=k9"),
        ([f"{ACTOR}.loss_agg_mode=mean"], "loss_agg_mode=mean"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=nonsense"], r"kl_ctrl\.type=nonsense"),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, horizon: 0}"],
            r"kl_ctrl\.type=adaptive.*horizon",
        ),
        (["actor_rollout_ref.rollout.name=nonsense"], r"rollout\.name=nonsense.*embedded"),
        (["actor_rollout_ref.rollout.name=null"], r"rollout\.name is not set"),
        (["actor_rollout_ref.rollout.name=???"], r"rollout\.name is not set"),
        (["trainer.v1.trainer_mode=nonsense"], r"trainer_mode=nonsense.*sync"),
        (["reward.reward_manager.name=nonsense"], r"reward_manager\.name=nonsense"),
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


def test_names_in_files_and_modules_that_only_the_run_loads(tmp_path):
    mine = tmp_path / "data.py"
    mine.write_text("@register_adv_est('mine')\ndef mine(**kwargs): ...\n")
    check("algorithm.adv_estimator=mine", f"data.custom_cls.path={mine}")
    with pytest.raises(ValueError, match="adv_estimator=other"):
        check("algorithm.adv_estimator=other", f"data.custom_cls.path={mine}")
    elsewhere = "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=mine"
    check(
        elsewhere, "algorithm.adv_estimator=other", "trainer.v1.trainer_mode=other", f"{ACTOR}.policy_loss.loss_mode=other"
    )  # fmt: skip


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
