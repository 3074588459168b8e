"""Whether a run, a rollout or a process is ours."""

from types import SimpleNamespace

import pytest

from verl_patches import ours


def config(**strategies: str) -> dict:
    roles = {role: {"strategy": strategies[role]} for role in ("actor", "ref") if role in strategies}
    rest = {part: {"strategy": strategies[part]} for part in ("critic", "engine") if part in strategies}
    return {"actor_rollout_ref": roles, **rest}


@pytest.mark.parametrize(
    "given, roles, trains",
    [
        (config(actor="megatrain", ref="megatrain", critic="fsdp"), {"actor", "ref"}, True),
        (config(actor="fsdp", ref="megatrain"), {"ref"}, False),
        (config(actor="fsdp", ref="fsdp", critic="megatrain"), {"critic"}, False),
        (config(engine="megatrain"), {"engine"}, True),
        (config(actor="fsdp"), set(), False),
        ({"actor_rollout_ref": None, "engine": None}, set(), False),
        ({}, set(), False),
        (None, set(), False),
    ],
)
def test_runs(given, roles, trains):
    assert ours.our_roles(given) == roles and ours.is_ours(given) == trains


def test_rollouts_carry_a_mark_beside_what_the_user_has_there():
    assert ours.is_our_rollout(SimpleNamespace(custom=ours.marked(None)))
    assert ours.marked({"mine": 1}) == {"mine": 1, "megatrain_rl": True}
    plan = {"share": 0.5}
    assert ours.is_our_rollout(SimpleNamespace(custom=ours.marked(None, plan)))
    assert ours.rollout_plan(ours.marked({"mine": 1}, plan)) == plan and ours.rollout_plan(ours.marked(None)) == {}
    for custom in (None, {}, {"mine": 1}):
        assert ours.rollout_plan(custom) == {}
        assert not ours.is_our_rollout(SimpleNamespace(custom=custom))


def test_verl_leaves_the_mark_where_it_is():
    """A field for what VERL does not know, handed on to the engine's server."""
    from verl.workers.config import RolloutConfig

    assert RolloutConfig(name="vllm", custom=ours.marked(None)).custom == {"megatrain_rl": True}


def test_the_trainers_process_is_known_by_its_engine(monkeypatch):
    monkeypatch.setattr(ours, "_engine_lives_here", False)
    assert not ours.engine_lives_here()
    ours.note_engine()
    assert ours.engine_lives_here()


@pytest.mark.parametrize(
    "given, concerned",
    [
        (config(actor="megatrain"), True),
        ({"actor_rollout_ref": {"actor": {"strategy": "fsdp", "megatrain": {"ring_depth": 2}}}}, True),
        (config(critic="megatrain"), True),
        (config(actor="fsdp", ref="fsdp"), False),
        ({"engine": "a word", "actor_rollout_ref": 3}, False),
    ],
)
def test_whose_config_is_our_concern(given, concerned):
    assert ours.concerns_us(given) == concerned


def test_a_trainer_is_known_in_its_process(monkeypatch):
    monkeypatch.setattr(ours, "_trainer_lives_here", False)
    assert not ours.trainer_lives_here()
    ours.note_trainer()
    assert ours.trainer_lives_here()
