"""Numbers that cannot be meant are refused in the driver, with the setting; those of a usual run pass."""

import re

import pytest
from verl_cases import DP, OURS, RUN, composed

from megatrain_rl.verl_plugin.driver import numbers

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def check(*overrides: str, selected=OURS) -> None:
    numbers.check_numbers(composed(*RUN, *selected, *overrides))


@pytest.mark.parametrize("selected", [OURS, DP], ids=["model_engine", "strategy"])
def test_usual_runs(selected):
    check(selected=selected)
    dynamic = [f"{ACTOR}.use_dynamic_bsz=true", "trainer.save_freq=-1", "trainer.test_freq=0"]
    check(*dynamic, f"{ACTOR}.ppo_micro_batch_size_per_gpu=null", "data.gen_batch_size=512", selected=selected)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
@pytest.mark.parametrize(
    "setting",
    [
        "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs", f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.n", f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.response_length",
        f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.agent.num_workers", "trainer.total_epochs", "trainer.total_training_steps",
    ],
)  # fmt: skip
def test_counts(setting, value):
    with pytest.raises(ValueError, match=rf"^{re.escape(setting)}={value}: .*above 0"):
        check(f"{setting}={value}")


@pytest.mark.parametrize(
    "overrides, setting",
    [
        (["trainer.save_freq=null"], r"trainer\.save_freq=None"),
        (["trainer.test_freq=often"], r"trainer\.test_freq=often"),
        (["data.train_batch_size=64", "data.gen_batch_size=48"], r"data\.gen_batch_size=48: data\.train_batch_size=64"),
        ([f"{ROLLOUT}.temperature=0"], r"rollout\.temperature=0"),
        ([f"{ROLLOUT}.temperature=-1"], r"rollout\.temperature=-1"),
        ([f"{ROLLOUT}.temperature=null"], r"rollout\.temperature=None"),
        ([f"{ROLLOUT}.max_num_batched_tokens=100"], r"max_num_batched_tokens=100: .*max_num_seqs=256"),
        (
            [f"{ROLLOUT}.log_prob_use_dynamic_bsz=true"],
            r"log_prob_use_dynamic_bsz=True: .*actor\.use_dynamic_bsz=False",
        ),
        ([f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null"], r"rollout\.log_prob_micro_batch_size_per_gpu=None"),
    ],
)
def test_what_vllm_or_verl_would_refuse_later(overrides, setting):
    with pytest.raises(ValueError, match=setting):
        check(*overrides)


@pytest.mark.parametrize("selected", [OURS, DP], ids=["model_engine", "strategy"])
@pytest.mark.parametrize(
    "value", ["lr=-1", "betas=[0.9]", "weight_decay=-1", "clip_grad=-1", "lr_scheduler_type=nonsense"]
)
def test_the_optimizers_numbers(selected, value):
    with pytest.raises(ValueError, match=rf"actor\.optim: .*{value.split('=')[0]}"):
        check(f"{ACTOR}.optim.{value}", selected=selected)


def test_only_eps_is_understood_of_other_optimizer_settings():
    given = f"+{ACTOR}.optim.override_optimizer_config"
    with pytest.raises(ValueError, match=r"actor\.optim: .*override_optimizer_config.*foreach"):
        check(f"{given.lstrip('+')}={{foreach: true}}", selected=DP)
    check(f"{given.lstrip('+')}={{eps: 1e-7}}", selected=DP)


def test_pieces_of_a_batch_that_verl_sets_itself_are_not_looked_at():
    given = ["data.train_batch_size=64", "data.gen_batch_size=48"]
    check(*given, "algorithm.filter_groups.enable=true")
    check(*given, "trainer.v1.trainer_mode=colocate_async")
    check(*given, "trainer.use_v1=false")


@pytest.mark.parametrize(
    "value, told", [("top_p=0.9", 1), ("top_k=50", 1), ("+repetition_penalty=1.1", 1), ("top_k=-1", 0)]
)
def test_a_changed_distribution_is_told(caplog, value, told):
    sign = "+" if value[0] == "+" else ""
    check(f"{sign}{ROLLOUT}.{value.lstrip('+')}")
    warnings = [r.getMessage() for r in caplog.records if r.name == numbers.__name__]
    assert len(warnings) == told and all(value.lstrip("+") in warning for warning in warnings)
