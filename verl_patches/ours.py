"""Does a run, a rollout or this process belong to strategy `megatrain`? This is the one home of that question.

A patch changes something only if the answer is yes, so that a run of another strategy is the same with the plug-in
installed.
"""

from collections.abc import Mapping
from typing import Any

STRATEGY = "megatrain"
# VERL's name of a trainer, and the name of our subclass of it, in VERL's registry of trainers. The subclasses are in
# megatrain_rl/verl_plugin/task_runner.
TRAINERS = {"sync": "megatrain_sync", "colocate_async": "megatrain_colocate_async"}
# `rollout.custom` is VERL's place for settings that it does not know; this key in it marks a rollout of ours.
_ROLLOUT_KEY = "megatrain_rl"

_engine_lives_here = False


def our_roles(config: Mapping[str, Any] | None) -> set[str]:
    """Which parts of VERL's config ask for strategy megatrain: actor, ref and critic in RL, engine in SFT."""
    config = config or {}
    roles = config.get("actor_rollout_ref") or {}
    parts = {"actor": roles.get("actor"), "ref": roles.get("ref"), "critic": config.get("critic")}
    parts["engine"] = config.get("engine")
    return {name for name, part in parts.items() if part and part.get("strategy") == STRATEGY}


def is_ours(config: Mapping[str, Any] | None) -> bool:
    """Whether strategy megatrain trains in this run."""
    return not our_roles(config).isdisjoint({"actor", "engine"})


def marked(custom: Mapping[str, Any] | None) -> dict[str, Any]:
    """The value of `rollout.custom` in a run of ours: the user's own entries, and our mark."""
    return {**(custom or {}), _ROLLOUT_KEY: True}


def is_our_rollout(rollout: Any) -> bool:
    """Whether a rollout config (VERL's RolloutConfig, with attribute `custom`) carries the mark."""
    return _ROLLOUT_KEY in (rollout.custom or {})


def note_engine() -> None:
    """Remember that an engine of ours is built in this process."""
    global _engine_lives_here
    _engine_lives_here = True


def engine_lives_here() -> bool:
    """Whether an engine of ours was built in this process."""
    return _engine_lives_here
