"""Runs that strategy megatrain does not support are refused in one line, by driver and engine; other runs pass."""

import json
import shutil

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
        ("critic.enable=true", "critic.enable=True"),
        ("custom_reward_function.path=mine.py", "custom_reward_function.path=mine.py"),
        ("+custom_reward_function.reward_kwargs={a: 1}", "custom_reward_function.reward_kwargs.a=1"),
        ("reward_model.rollout.name=vllm", "reward_model.rollout.name=vllm"),
        ("sandbox_fusion.url=http://here", "sandbox_fusion.url=http://here"),
        ("data.tokenizer=other", "data.tokenizer=other"),
        ("actor_rollout_ref.rollout.mode=sync", "rollout.mode=sync"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"),
        ("actor_rollout_ref.rollout.data_parallel_size=2", "rollout.data_parallel_size=2"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size=4", "rollout.log_prob_micro_batch_size=4"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size=4", "ref.log_prob_micro_batch_size=4"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=4", "actor.ppo_micro_batch_size=4"),
        ("actor_rollout_ref.actor.checkpoint.load_contents=[model]", "actor.checkpoint.load_contents=['model']"),
        ("actor_rollout_ref.hybrid_engine=false", "hybrid_engine=False"),
        ("algorithm.use_pf_ppo=true", "algorithm.use_pf_ppo=True"),
        ("trainer.critic_warmup=5", "trainer.critic_warmup=5"),
        ("trainer.del_local_ckpt_after_load=true", "trainer.del_local_ckpt_after_load=True"),
        ("global_profiler.tool=precision_debugger", "global_profiler.tool=precision_debugger"),
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


def test_an_optimizer_other_than_adamw_is_refused_on_dp():
    with pytest.raises(ValueError, match=r"actor\.optim\.optimizer=SGD"):
        validate(*DP, "actor_rollout_ref.actor.optim.optimizer=SGD")


def test_the_configs_of_another_engine_are_refused():
    """model_engine=veomni builds VeOmni's engine whatever the strategy of the actor says."""
    with pytest.raises(ValueError, match=r"model_engine=veomni.*megatrain"):
        validate("model_engine=veomni", *DP)


def test_a_reward_model_beside_both_is_refused_on_cuda():
    judge = ["reward.reward_model.enable=true", "reward.reward_model.rollout.name=vllm"]
    with pytest.raises(ValueError, match=r"reward\.reward_model\.enable=True"):
        validate(*DP, *judge, "trainer.device=cuda")
    validate(*DP, *judge, "trainer.device=cuda", "reward.reward_model.enable_resource_pool=true")


BYPASS = "algorithm.rollout_correction.bypass_mode=true"
IN_ACTOR = "actor_rollout_ref.actor.policy_loss"


# Settings of bypass mode, of which the last makes a difference only with the others.
BYPASS_SETTINGS = [
    ["loss_type=reinforce"],
    ["rollout_rs_threshold=2.0", "rollout_rs=token_k1"],
    ["rollout_rs=token_k2", "rollout_rs_threshold=0.5"],
    ["loss_type=reinforce", "rollout_is=token"],
    ["loss_type=reinforce", "rollout_is=token", "rollout_is_threshold=1.5"],
    ["loss_type=reinforce", "rollout_is=token", "rollout_is_batch_normalize=true"],
]


@pytest.mark.parametrize("asked", BYPASS_SETTINGS)
@pytest.mark.parametrize("selected", [OURS, DP])
def test_a_correction_that_does_not_reach_the_actor_is_refused(selected, asked):
    """VERL's trainer notes it in the driver's config, of which the actor has had its part already."""

    def actor(settings):
        return [f"+{IN_ACTOR}.rollout_correction={{{', '.join(settings).replace('=', ': ')}}}"]

    run = [*selected, BYPASS, *(f"algorithm.rollout_correction.{each}" for each in asked)]
    with pytest.raises(ValueError, match=r"rollout_correction\.\w+=.*policy_loss\.loss_mode=bypass_mode"):
        validate(*run)
    key = asked[-1].split("=")[0]
    with pytest.raises(ValueError, match=rf"rollout_correction\.{key}="):
        validate(*run, f"{IN_ACTOR}.loss_mode=bypass_mode", *(actor(asked[:-1]) if asked[:-1] else []))
    validate(*run, f"{IN_ACTOR}.loss_mode=bypass_mode", *actor(asked))
    validate(*selected, BYPASS)
    validate(*run[len(selected) :])  # another strategy's run


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


def with_code_of_its_own(tiny_model, folder) -> str:
    """The tiny model with a class of its own, which transformers would run if it is trusted."""
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}))
    return str(folder)


def test_a_models_own_code_is_refused_in_the_driver(tiny_model, tmp_path):
    run = [*OURS, f"actor_rollout_ref.model.path={with_code_of_its_own(tiny_model, tmp_path / 'model')}"]
    validate(*run)  # untrusted, it is transformers' own class there too
    with pytest.raises(ValueError, match=r"model\.trust_remote_code=True.*mine\.Mine"):
        validate(*run, "actor_rollout_ref.model.trust_remote_code=true")
    validate(*OURS, f"actor_rollout_ref.model.path={tiny_model}", "actor_rollout_ref.model.trust_remote_code=true")


@pytest.mark.usefixtures("world")
def test_a_models_own_code_is_refused_by_the_engine(tiny_model, tmp_path):
    from verl_cases import make_engine

    with pytest.raises(ValueError, match=r"model\.trust_remote_code=True.*mine\.Mine"):
        make_engine(with_code_of_its_own(tiny_model, tmp_path / "model"), model_settings={"trust_remote_code": True})
