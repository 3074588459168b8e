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

_driver_lives_here = False
_engine_lives_here = False
_trainer_lives_here = False
_sft_lives_here = False


def our_roles(config: Mapping[str, Any] | None) -> set[str]:
    """Which parts of VERL's config ask for strategy megatrain: actor, ref and critic in RL, engine in SFT."""
    parts = _parts(config)
    return {name for name, part in parts.items() if part.get("strategy") == STRATEGY}


def concerns_us(config: Mapping[str, Any] | None) -> bool:
    """Whether a part of VERL's config asks for strategy megatrain, or has settings of ours under another strategy."""
    return bool(our_roles(config)) or any("megatrain" in part for part in _parts(config).values())


def is_ours(config: Mapping[str, Any] | None) -> bool:
    """Whether strategy megatrain trains in this run."""
    return not our_roles(config).isdisjoint({"actor", "engine"})


def _parts(config: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """The parts of a config that may have a strategy. A logger may be given any config, even none of VERL's."""
    whole = config if isinstance(config, Mapping) else {}
    roles = whole.get("actor_rollout_ref")
    roles = roles if isinstance(roles, Mapping) else {}
    parts = {"actor": roles.get("actor"), "ref": roles.get("ref")}
    parts |= {"critic": whole.get("critic"), "engine": whole.get("engine")}
    return {name: part for name, part in parts.items() if isinstance(part, Mapping)}


def marked(custom: Mapping[str, Any] | None, plan: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The value of `rollout.custom` in a run of ours: the user's own entries, and our mark.

    plan: how the GPU is divided, if it is; it travels in the mark, see `rollout_plan`.
    """
    return {**(custom or {}), _ROLLOUT_KEY: dict(plan) if plan else True}


def is_our_rollout(rollout: Any) -> bool:
    """Whether a rollout config (VERL's RolloutConfig, with attribute `custom`) carries the mark."""
    return _ROLLOUT_KEY in (rollout.custom or {})


def rollout_plan(custom: Any) -> dict[str, float]:
    """The plan that the driver put into `rollout.custom`: how the GPU is divided. Empty if it divided none."""
    plan = custom.get(_ROLLOUT_KEY) if isinstance(custom, Mapping) else None
    return dict(plan) if isinstance(plan, Mapping) else {}


def note_engine() -> None:
    """Remember that an engine of ours is built in this process."""
    global _engine_lives_here
    _engine_lives_here = True


def engine_lives_here() -> bool:
    """Whether an engine of ours was built in this process."""
    return _engine_lives_here


def note_sft_run() -> None:
    """Remember that VERL's SFT trainer runs in this process for a run of ours: with torchrun beside the engine."""
    global _sft_lives_here
    _sft_lives_here = True


def sft_lives_here() -> bool:
    """Whether VERL's SFT trainer runs in this process for a run of ours."""
    return _sft_lives_here


def note_driver() -> None:
    """Remember that this process is the driver of a run of ours."""
    global _driver_lives_here
    _driver_lives_here = True


def driver_lives_here() -> bool:
    """Whether this process is the driver of a run of ours: it has prepared the run, and starts Ray next."""
    return _driver_lives_here


def note_trainer() -> None:
    """Remember that a trainer of ours (megatrain_rl/verl_plugin/task_runner) is built in this process."""
    global _trainer_lives_here
    _trainer_lives_here = True


def trainer_lives_here() -> bool:
    """Whether a trainer of ours was built in this process: it has its logger watched itself."""
    return _trainer_lives_here
