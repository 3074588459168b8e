"""Runs that strategy megatrain does not support are refused in one line, by driver and engine; other runs pass."""

import pytest
from verl_cases import DP, OURS, validate


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("trainer.n_gpus_per_node=2", "trainer.n_gpus_per_node x trainer.nnodes=2"),
        ("algorithm.adv_estimator=gae", "set algorithm.adv_estimator=grpo"),
        ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_rank=8"),
        ("actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.rank=8"),
        ("actor_rollout_ref.model.lora_adapter_path=/some/adapter", "lora_adapter_path=/some/adapter"),
        ("actor_rollout_ref.model.mtp.enable=true", "mtp.enable=True"),
        ("actor_rollout_ref.actor.use_prefix_grouper=true", "use_prefix_grouper=True"),
        ("actor_rollout_ref.actor.calculate_sum_pi_squared=true", "calculate_sum_pi_squared=True"),
        ("actor_rollout_ref.actor.qat.enable=true", "qat.enable=True"),
        ("distillation.enabled=true", "distillation.enabled=True"),
        ("trainer.default_hdfs_dir=/hdfs", "trainer.default_hdfs_dir=/hdfs"),
        ("actor_rollout_ref.actor.checkpoint.async_save=true", "checkpoint.async_save=True"),
        ("trainer.v1.trainer_mode=separate_async", "trainer_mode=separate_async"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded", "backend=delta_sharded"),
    ],
)
@pytest.mark.parametrize("selected", [OURS, DP])
def test_unsupported_is_refused_in_the_driver(selected, extra, expected):
    with pytest.raises(ValueError, match="strategy megatrain") as refusal:
        validate(*selected, extra)
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)


def test_our_knobs_with_another_strategy_are_refused():
    with pytest.raises(ValueError, match=r"^actor_rollout_ref\.actor\.strategy=fsdp"):
        validate(*OURS, "actor_rollout_ref.actor.strategy=fsdp", "trainer.n_gpus_per_node=2")


def test_a_reference_of_its_own_is_refused_on_cuda():
    separate = ["actor_rollout_ref.model.lora_adapter_path=null", "actor_rollout_ref.actor.use_kl_loss=true"]
    with pytest.raises(ValueError, match=r"lora_adapter_path=None.*GPU budget"):
        validate(*OURS, *separate, "trainer.device=cuda")
    validate(*OURS, *separate, "trainer.device=cpu")


def test_a_reference_of_another_engine_is_refused_on_cuda():
    mixed = [DP[0], "actor_rollout_ref.ref.strategy=fsdp", "trainer.device=cuda"]
    with pytest.raises(ValueError, match=r"ref\.strategy=fsdp.*megatrain"):
        validate(*mixed, "actor_rollout_ref.actor.use_kl_loss=true")
    validate(*mixed)


BYPASS = "algorithm.rollout_correction.bypass_mode=true"
IN_ACTOR = "actor_rollout_ref.actor.policy_loss"


@pytest.mark.parametrize("asked", ["loss_type=reinforce", "rollout_rs=token_k1"])
@pytest.mark.parametrize("selected", [OURS, DP])
def test_a_correction_that_does_not_reach_the_actor_is_refused(selected, asked):
    """VERL's trainer notes it in the driver's config, of which the actor has had its part already."""
    run = [*selected, BYPASS, f"algorithm.rollout_correction.{asked}"]
    with pytest.raises(ValueError, match=rf"rollout_correction\.{asked}.*policy_loss\.loss_mode=bypass_mode"):
        validate(*run)
    with pytest.raises(ValueError, match=rf"rollout_correction\.{asked}"):
        validate(*run, f"{IN_ACTOR}.loss_mode=bypass_mode")
    key, value = asked.split("=")
    validate(*run, f"{IN_ACTOR}.loss_mode=bypass_mode", f"+{IN_ACTOR}.rollout_correction={{{key}: {value}}}")
    validate(*selected, BYPASS)
    validate(BYPASS, f"algorithm.rollout_correction.{asked}")  # another strategy's run


def test_ulysses_is_refused_on_dp():
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=2"):
        validate(*DP, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")


def test_other_strategies_are_not_our_business():
    validate("trainer.n_gpus_per_node=2", "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.name=hf")


def test_supported_runs_pass():
    assert validate(*OURS).actor_rollout_ref.rollout.free_cache_engine is False
    validate(*DP, "actor_rollout_ref.actor.use_kl_loss=true")
    validate(*OURS, "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov")


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("model_settings", "expected"),
    [
        ({"lora_rank": 4}, "model.lora_rank=4"),
        ({"lora": {"rank": 4}}, "model.lora.rank=4"),
        ({"lora_adapter_path": "/some/adapter"}, "model.lora_adapter_path"),
    ],
)
def test_unsupported_is_refused_by_the_engine(tiny_model, model_settings, expected):
    from verl_cases import make_engine

    with pytest.raises(ValueError, match=expected):
        make_engine(tiny_model, model_settings=model_settings)


@pytest.mark.usefixtures("world")
def test_a_model_that_brings_its_own_class_is_refused(tiny_model):
    """VERL's own engines would run it; without trust_remote_code transformers takes its own, as here."""
    from verl.workers.config import FSDPEngineConfig, HFModelConfig

    from megatrain_rl.verl_plugin.supported import check_engine

    rest = {"engine": FSDPEngineConfig(), "optim": None, "world_size": 1, "async_save": False, "load_contents": []}
    for trusted, own, refused in [(True, True, True), (False, True, False), (True, False, False)]:
        model = HFModelConfig(path=tiny_model, trust_remote_code=trusted)
        if own:
            model.hf_config.auto_map = {"AutoModelForCausalLM": "modeling_my.MyModel"}
        if refused:
            with pytest.raises(ValueError, match=r"trust_remote_code=True.*modeling_my\.MyModel"):
                check_engine(model=model, **rest)
        else:
            check_engine(model=model, **rest)


@pytest.mark.usefixtures("world")
def test_fsdp_configs_are_checked_by_the_engine(tiny_model):
    """On model_engine=dp the engine gets FSDP's configs; what they ask for beyond ours is refused."""
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    from megatrain_rl.verl_plugin.supported import check_engine

    model = HFModelConfig(path=tiny_model)
    good = {
        "model": model,
        "engine": FSDPEngineConfig(),
        "optim": FSDPOptimizerConfig(),
        "world_size": 1,
        "async_save": False,
    }
    contents = ["model", "optimizer", "extra"]
    check_engine(**good, load_contents=contents)
    for bad, expected in [
        ({"engine": FSDPEngineConfig(ulysses_sequence_parallel_size=2)}, "ulysses_sequence_parallel_size=2"),
        ({"optim": FSDPOptimizerConfig(optimizer="Adam")}, "torch.optim.Adam"),
        ({"world_size": 2}, "world size=2"),
        ({"async_save": True}, "checkpoint.async_save=True"),
        ({"load_contents": ["model"]}, "checkpoint.load_contents"),
    ]:
        with pytest.raises(ValueError, match=expected):
            check_engine(**{**good, "load_contents": contents, **bad})
