"""The config classes that VERL's yaml files build: defaults, values that reach the engine, refusals of bad ones."""

import dataclasses
import pickle

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl_cases import OURS, RUN, composed, validate

from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.verl_plugin import config as plugin_config
from megatrain_rl.verl_plugin.config import MegaTrainOptimizerConfig, adamw_config, engine_config, lr_schedule


def test_yaml_lists_every_knob_with_its_default():
    engine = composed("engine=megatrain", name="sft_trainer_engine").engine
    given = {key: engine[key] for key in engine if key in {f.name for f in dataclasses.fields(StreamConfig)}}
    assert given == dataclasses.asdict(StreamConfig())
    actor = omega_conf_to_dataclass(composed(*OURS, *RUN).actor_rollout_ref.actor)
    assert actor.engine.stream_config() == StreamConfig()


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


def test_fields_of_verls_that_would_be_ignored_are_refused():
    with pytest.raises(ValueError, match=r"megatrain\.dtype.*megatrain\.(param|grad)_dtype"):
        engine_config(dtype="float32")


def test_bad_value_is_named():
    with pytest.raises(Exception, match=r"ring_depth=0: .*at least 1"):
        validate(*OURS, "actor_rollout_ref.actor.megatrain.ring_depth=0")


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
