"""The driver refuses a run, or fills in its settings: one function changes nothing, the other refuses nothing."""

import os

import pytest
from omegaconf import OmegaConf
from verl_cases import DP, OURS, RUN, composed, validate

from megatrain_rl.verl_plugin.driver import environment, prepare
from verl_patches import ours

READY = (*RUN, "data.train_batch_size=256", "trainer.logger=[console]")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (*environment._ENVIRONMENT, *environment._LOOPBACK):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("MEGATRAIN_RL_STARTED", "")


@pytest.mark.parametrize("selected", [OURS, DP], ids=["model_engine", "strategy"])
def test_refusing_changes_nothing(selected):
    config = composed(*READY, *selected)
    before = OmegaConf.to_yaml(config)
    prepare.refuse(config)
    assert OmegaConf.to_yaml(config) == before


@pytest.mark.parametrize("selected", [OURS, DP], ids=["model_engine", "strategy"])
def test_what_is_filled_in(selected):
    config = composed(*READY, *selected, "actor_rollout_ref.actor.use_kl_loss=true")
    before = OmegaConf.to_container(config)
    prepare.prepare(config)
    after = OmegaConf.to_container(config)
    changed = {key for key, value in flat(after).items() if flat(before).get(key, "absent") != value}
    expected = {"trainer.v1.trainer_mode", "actor_rollout_ref.rollout.custom.megatrain_rl"}
    if selected is OURS:
        expected |= {"actor_rollout_ref.rollout.max_model_len", "actor_rollout_ref.rollout.gpu_memory_utilization"}
    else:
        expected |= {"actor_rollout_ref.model.lora_adapter_path"}
    assert changed == expected
    assert ours.is_our_rollout(config.actor_rollout_ref.rollout)
    prepare.prepare(config)
    assert OmegaConf.to_container(config) == after, "a second time changes nothing"


def test_what_the_user_has_in_custom_stays():
    config = composed(*READY, *OURS, "+actor_rollout_ref.rollout.custom.mine=3")
    prepare.prepare(config)
    assert config.actor_rollout_ref.rollout.custom == {"mine": 3, "megatrain_rl": True}


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_the_trainer_is_ours_by_verls_registry(mode):
    from verl.trainer.ppo.v1 import get_trainer_cls

    config = composed(*READY, *OURS, f"trainer.v1.trainer_mode={mode}")
    prepare.prepare(config)
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)
    assert trainer is not get_trainer_cls(mode) and issubclass(trainer, get_trainer_cls(mode))


@pytest.mark.parametrize(
    "overrides, given, kept",
    [(OURS, None, "0"), (OURS, "250", "250"), ([], None, None)],
    ids=["ours", "set by hand", "another engine"],
)
def test_ray_leaves_host_ram_to_the_run(monkeypatch, overrides, given, kept):
    """By default Ray kills a process when 95 % is in use, and starts a process per core that the run cannot use."""
    names = ("RAY_memory_monitor_refresh_ms", "RAY_prestart_worker_first_driver")
    for name in names:
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
    validate(*overrides)
    assert [os.environ.get(name) for name in names] == [kept, kept]


def test_a_bad_time_limit_is_refused_in_the_driver(monkeypatch):
    monkeypatch.setenv("MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT=soon"):
        validate(*OURS)


def test_a_trainer_of_the_users_own_is_kept_and_told(caplog, monkeypatch):
    from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

    monkeypatch.setitem(trainer_base.TRAINER_REGISTRY, "mine", get_trainer_cls("sync"))
    config = composed(*READY, *OURS, "trainer.v1.trainer_mode=mine")
    prepare.prepare(config)
    assert config.trainer.v1.trainer_mode == "mine" and "trainer.v1.trainer_mode=mine" in caplog.text


def test_verls_older_trainer_is_left_alone():
    config = composed(*READY, *OURS, "trainer.use_v1=false")
    prepare.prepare(config)
    assert config.trainer.v1.trainer_mode == "sync"


def test_runs_of_other_strategies_are_left_alone():
    config = composed(*READY, "trainer.n_gpus_per_node=2", "trainer.logger=[no_such_logger]")
    before = OmegaConf.to_yaml(config)
    prepare.prepare(config)
    assert OmegaConf.to_yaml(config) == before


def flat(node, prefix: str = "") -> dict:
    if not isinstance(node, dict):
        return {prefix[:-1]: node}
    return {key: value for name, child in node.items() for key, value in flat(child, f"{prefix}{name}.").items()}
