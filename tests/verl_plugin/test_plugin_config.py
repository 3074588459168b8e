"""Hydra composition, knobs, refusals: what a user sees before anything runs."""

import dataclasses
import os
import pickle

import pytest
import verl  # noqa: F401  (loads the plug-in)
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass, validate_config

from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.verl_plugin import config as plugin_config
from megatrain_rl.verl_plugin.config import MegaTrainOptimizerConfig, adamw_config, engine_config, lr_schedule

OURS = ["model_engine=megatrain"]
DP = ["actor_rollout_ref.actor.strategy=megatrain", "actor_rollout_ref.ref.strategy=megatrain"]
RUN = [
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
]


def composed(*overrides: str, name: str = "ppo_trainer"):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides=list(overrides))


def validate(*overrides: str):
    config = composed(*RUN, *overrides)
    validate_config(config, use_reference_policy=config.actor_rollout_ref.actor.use_kl_loss, use_critic=False)
    return config


def test_yaml_lists_every_knob_with_its_default():
    engine = composed("engine=megatrain", name="sft_trainer_engine").engine
    given = {key: engine[key] for key in engine if key in {f.name for f in dataclasses.fields(StreamConfig)}}
    assert given == dataclasses.asdict(StreamConfig())
    actor = omega_conf_to_dataclass(composed(*OURS, *RUN).actor_rollout_ref.actor)
    assert actor.engine.stream_config() == StreamConfig()


@pytest.mark.parametrize(
    "overrides, given, kept",
    [(OURS, None, "0"), (OURS, "250", "250"), ([], None, None)],
    ids=["ours", "set by hand", "another engine"],
)
def test_ray_leaves_host_ram_to_the_run(monkeypatch, overrides, given, kept):
    """By default its monitor kills a process when 95 % of it is in use, and a process per core is started that the run cannot use."""
    names = ("RAY_memory_monitor_refresh_ms", "RAY_prestart_worker_first_driver")
    for name in names:
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
    validate(*overrides)
    assert [os.environ.get(name) for name in names] == [kept, kept]


def test_host_ram_is_left_to_the_rest_of_the_run(monkeypatch):
    monkeypatch.setattr(plugin_config, "usable_host_bytes", lambda: 120 * 10**9)
    engine = omega_conf_to_dataclass(composed(*OURS, *RUN).actor_rollout_ref.actor).engine
    assert engine.stream_config().host_budget_gb is None
    assert engine.stream_config_here().host_budget_gb == 108
    set_by_hand = omega_conf_to_dataclass(
        composed(*OURS, *RUN, "actor_rollout_ref.actor.megatrain.host_budget_gb=119").actor_rollout_ref.actor
    ).engine
    assert set_by_hand.stream_config_here().host_budget_gb == 119
    monkeypatch.setattr(plugin_config, "usable_host_bytes", lambda: 8 * 10**9)
    assert engine.stream_config_here().host_budget_gb == 6, "never more than a quarter"
    supervised = omega_conf_to_dataclass(composed("engine=megatrain", name="sft_trainer_engine").engine)
    assert supervised.stream_config_here().host_budget_gb is None
    with pytest.raises(Exception, match="host_reserve_gb=-1"):
        engine_config(host_reserve_gb=-1)


def test_optimizer_yaml_is_adamw_default():
    optim = omega_conf_to_dataclass(composed("optim=megatrain", name="sft_trainer_engine").optim)
    assert adamw_config(optim) == AdamWConfig()


def test_knobs_reach_actor_and_reference():
    config = composed(*OURS, *RUN, "actor_rollout_ref.actor.megatrain.ring_depth=3")
    OmegaConf.resolve(config.actor_rollout_ref)
    assert config.actor_rollout_ref.ref.megatrain.ring_depth == 3
    assert config.actor_rollout_ref.ref.megatrain.forward_only
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine
    assert engine.stream_config().ring_depth == 3
    assert pickle.loads(pickle.dumps(engine)) == engine


@pytest.mark.parametrize("sign", ["", "+", "++"])
@pytest.mark.parametrize("node", ["actor", "ref"])
def test_misspelt_knob_names_its_neighbour(sign, node):
    wrong = f"actor_rollout_ref.{node}.megatrain.rng_depth"
    expected = f"^unknown setting {wrong}; did you mean .*megatrain.ring_depth"
    with pytest.raises(ConfigCompositionException, match=expected):
        composed(*OURS, f"{sign}{wrong}=3")


def test_misspelt_knob_in_sft_and_in_a_file():
    with pytest.raises(ConfigCompositionException, match="engine.ring_depth"):
        composed("engine=megatrain", "engine.rng_depth=3", name="sft_trainer_engine")
    with pytest.raises(ValueError, match="unknown setting megatrain.dtype; did you mean megatrain.(param|grad)_dtype"):
        engine_config(dtype="float32")


def test_bad_value_is_named():
    with pytest.raises(Exception, match="ring_depth=0: must be a whole number of at least 1"):
        validate(*OURS, "actor_rollout_ref.actor.megatrain.ring_depth=0")


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
        ("actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "loss_mode=kl_cov"),
    ],
)
@pytest.mark.parametrize("selected", [OURS, DP])
def test_unsupported_is_refused_in_the_driver(selected, extra, expected):
    with pytest.raises(ValueError, match="not supported by strategy megatrain") as refusal:
        validate(*selected, extra)
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)


def test_our_knobs_with_another_strategy_are_refused():
    with pytest.raises(ValueError, match="actor_rollout_ref.actor.strategy=fsdp: not supported"):
        validate(*OURS, "actor_rollout_ref.actor.strategy=fsdp", "trainer.n_gpus_per_node=2")


def test_a_reference_of_its_own_is_refused_on_cuda():
    separate = ["actor_rollout_ref.model.lora_adapter_path=null", "actor_rollout_ref.actor.use_kl_loss=true"]
    with pytest.raises(ValueError, match="lora_adapter_path=None: not supported .* GPU budget a second time"):
        validate(*OURS, *separate, "trainer.device=cuda")
    validate(*OURS, *separate, "trainer.device=cpu")


def test_a_reference_of_another_engine_is_refused_on_cuda():
    mixed = [DP[0], "actor_rollout_ref.ref.strategy=fsdp", "trainer.device=cuda"]
    with pytest.raises(ValueError, match="ref.strategy=fsdp: not supported .* set it to megatrain"):
        validate(*mixed, "actor_rollout_ref.actor.use_kl_loss=true")
    validate(*mixed)


@pytest.mark.parametrize("key", ["forward_only=true", "strategy=fsdp", "reference_for_kl_loss=false"])
def test_what_follows_from_other_settings_cannot_be_set(key):
    with pytest.raises(ConfigCompositionException, match="follows from other settings and cannot be set"):
        composed(*OURS, f"actor_rollout_ref.actor.megatrain.{key}")


def test_ulysses_is_refused_on_dp():
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=2"):
        validate(*DP, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")


def test_other_strategies_are_not_our_business():
    validate("trainer.n_gpus_per_node=2", "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.name=hf")


def test_supported_runs_pass():
    assert validate(*OURS).actor_rollout_ref.rollout.free_cache_engine is False
    validate(*DP, "actor_rollout_ref.actor.use_kl_loss=true")


def test_a_bad_time_limit_is_refused_in_the_driver(monkeypatch):
    monkeypatch.setenv("MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT=soon"):
        validate(*OURS)


def test_warm_up_and_schedule():
    settings = {"lr_warmup_steps_ratio": 0.25, "total_training_steps": 8, "lr_scheduler_type": "linear"}
    optim = MegaTrainOptimizerConfig(lr=1.0, **settings)
    schedule = lr_schedule(optim)
    assert (schedule.warmup_steps, schedule.total_steps, schedule.kind) == (2, 8, "linear")
    optim.lr_warmup_steps = 5
    assert lr_schedule(optim).warmup_steps == 5
    with pytest.raises(ValueError, match="lr_scheduler_type='step'"):
        MegaTrainOptimizerConfig(lr_scheduler_type="step")


def test_fsdp_optimizer_files_are_understood():
    optim = omega_conf_to_dataclass(composed("optim=fsdp", "optim.lr=0.1", name="sft_trainer_engine").optim)
    assert adamw_config(optim) == AdamWConfig(lr=0.1)
    assert lr_schedule(optim).kind == "constant"
    extra = ["optim=fsdp", "+optim.override_optimizer_config={eps: 1e-6, amsgrad: true}"]
    optim = omega_conf_to_dataclass(composed(*extra, name="sft_trainer_engine").optim)
    with pytest.raises(ValueError, match="amsgrad"):
        adamw_config(optim)


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
