"""Every key of VERL's config classes is honoured, refused or without effect; what is without effect is told once."""

import dataclasses
import logging

import pytest
from omegaconf import OmegaConf
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, HFModelConfig
from verl_cases import DP, OURS, RUN, composed, validate

from megatrain_rl.verl_plugin import settings, supported

PARTS = [
    (settings.ENGINE, FSDPEngineConfig), (settings.ACTOR, FSDPActorConfig), (settings.MODEL, HFModelConfig),
    (settings.CHECKPOINT, CheckpointConfig),
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(settings, "_told", set())


@pytest.mark.parametrize("part, cls", PARTS, ids=lambda p: getattr(p, "__name__", ""))
def test_every_key_has_its_place(part, cls):
    keys = [*part.honoured, *part.refused, *part.no_effect]
    assert len(keys) == len(set(keys))
    fields = {field.name for field in dataclasses.fields(cls)} - {"_target_"}
    assert not fields - set(keys), "a key of VERL's that has no place"
    assert set(keys) - fields <= {"router_replay", "pad_to_length_bucket"}, "a key that VERL no longer has"


ROLES = "actor_rollout_ref"
BELOW = {
    f"{ROLES}.model": settings.MODEL, f"{ROLES}.actor": settings.ACTOR, f"{ROLES}.actor.fsdp_config": settings.ENGINE,
    f"{ROLES}.ref.fsdp_config": settings.ENGINE, f"{ROLES}.actor.checkpoint": settings.CHECKPOINT, "": settings.RUN,
}  # fmt: skip


@pytest.mark.parametrize("selected", [OURS, DP], ids=["model_engine", "strategy"])
def test_every_key_of_a_run_has_its_place(selected):
    """The exception is what VERL's `_target_` names: a class, of which VERL builds the part."""
    places = [
        (f"{path}.{key}".lstrip("."), part)
        for path, part in BELOW.items()
        for key in (*part.honoured, *part.refused, *part.no_effect)
    ]
    keys = {key for key in leaves(OmegaConf.to_container(composed(*RUN, *selected))) if not key.endswith("_target_")}
    assert len(keys) > 500
    assert not [key for key in keys if not any(key == place or covers(place, key) for place, _ in places)]


def test_a_new_key_would_have_no_place():
    places = [f"{path}.{key}".lstrip(".") for path, part in BELOW.items() for key in part.honoured]
    for key in (f"{ROLES}.actor.new", f"{ROLES}.model.new", f"{ROLES}.actor.fsdp_config.new", "new.key"):
        assert not any(covers(place, key) for place in places), key


def covers(place: str, key: str) -> bool:
    """Parts have no dot at the end, but what lies below one of VERL's dictionaries belongs to it."""
    dictionary = place in DICTIONARIES
    return (place.endswith(".") or dictionary) and key.startswith(place if place.endswith(".") else f"{place}.")


DICTIONARIES = {
    *(f"{ROLES}.actor.{key}" for key in ("policy_loss", "qat", "profiler", "router_replay")),
    *(f"{ROLES}.{role}.fsdp_config.{key}" for role in ("actor", "ref") for key in ("wrap_policy", "qat", "turbo_config")),
    *(f"{ROLES}.model.{key}" for key in ("lora", "mtp", "fused_kernel_options", "tiled_mlp", "override_config")),
}  # fmt: skip


def leaves(node, prefix: str = "") -> list[str]:
    if not isinstance(node, dict) or not node:
        return [prefix.rstrip(".")]
    return [key for name, child in node.items() for key in leaves(child, f"{prefix}{name}.")]


@pytest.mark.parametrize("selected", [OURS, DP], ids=["model_engine", "strategy"])
def test_verls_own_values_are_fine_and_nothing_is_told(selected, caplog):
    with caplog.at_level(logging.WARNING, logger=settings.log.name):
        supported.check_run(composed(*RUN, *selected))
    assert not [record for record in caplog.records if record.name == settings.log.name]


@pytest.mark.parametrize(
    "setting, value",
    [
        ("dtype", "float32"),
        ("dtype", "float16"),
        ("+mixed_precision", "{param_dtype: bf16}"),
        ("full_determinism", "true"),
    ],
)
@pytest.mark.parametrize("role", ["actor", "ref"])
def test_what_would_be_ignored_is_refused(role, setting, value):
    key = f"actor_rollout_ref.{role}.fsdp_config.{setting}"
    with pytest.raises(ValueError, match=rf"{role}\.fsdp_config\.{setting.lstrip('+')}="):
        validate(*DP, f"{'+' if setting[0] == '+' else ''}{key.replace('+', '')}={value}")


@pytest.mark.parametrize(
    "override",
    [
        "actor.fsdp_config.param_offload=true", "actor.fsdp_config.optimizer_offload=true", "actor.fsdp_config.model_dtype=bf16",
        "actor.grad_clip=0.5", "model.use_liger=true", "model.enable_activation_offload=true", "actor.checkpoint.strict=false",
        "rollout.layered_summon=true",
    ],
)  # fmt: skip
def test_what_has_no_effect_is_told_once(override, caplog):
    key = override.split("=")[0]
    for _ in range(2):
        supported.check_run(composed(*RUN, *DP, f"actor_rollout_ref.{override}"))
    told = [r.getMessage() for r in caplog.records if r.name == settings.log.name]
    assert len(told) == 1 and f"actor_rollout_ref.{key}=" in told[0]


def test_runs_of_other_strategies_are_not_looked_at(caplog):
    supported.check_run(composed(*RUN, "actor_rollout_ref.actor.fsdp_config.dtype=float32"))
    assert not [record for record in caplog.records if record.name == settings.log.name]


def test_sft_is_told_too(caplog):
    overrides = ["engine=megatrain", "optim=megatrain", "model.use_liger=true", "checkpoint.save_contents=[model]"]
    supported.check_sft(composed(*overrides, name="sft_trainer_engine"))
    told = [r.getMessage() for r in caplog.records if r.name == settings.log.name]
    assert len(told) == 2 and "model.use_liger=True" in told[0] and "checkpoint.save_contents=" in told[1]
