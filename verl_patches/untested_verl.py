"""On a VERL version that was not tested, a run of ours is refused in one line, and no other run notices the plug-in.

Symptom: none upstream. On a VERL whose config fields have moved, our plug-in would misread settings and train with
    them.
Cause: VERL loads every installed plug-in, whatever the version of either.
Upstream: verl, __init__.py, entry points of the group `verl.plugins`.
Remove when: never. The patches are gated by version, and this says so where the gates are closed.

Nothing may fail here for runs of other strategies: a name that is missing in that version is passed over.
"""

import contextlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from verl_patches import versions
from verl_patches.ours import STRATEGY, our_roles
from verl_patches.wrap import wrap

_CHOICES = tuple(
    f"{key}={STRATEGY}"
    for key in (
        "model_engine",
        "engine",
        "engine.strategy",
        "actor_rollout_ref.actor.strategy",
        "actor_rollout_ref.ref.strategy",
    )
)


def message() -> str:
    """The one line of the refusal."""
    found = versions.installed("verl") or "of unknown version"
    return (
        f"strategy {STRATEGY} is tested with verl{versions.TESTED_VERL} and the installed verl is {found}: "
        f"pip install 'verl{versions.TESTED_VERL}', or choose another strategy"
    )


def install(on_import: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Refuse a run of ours at the first of three places that it reaches: command line, config check, engine."""
    on_import("hydra._internal.config_loader_impl", _passing_over(_refuse_overrides))
    on_import("verl.utils.config", _passing_over(_refuse_config))
    on_import("verl.workers.engine", _passing_over(_refuse_engine))


def _passing_over(apply: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def careful(module: ModuleType) -> None:
        with contextlib.suppress(Exception):
            apply(module)

    return careful


def asks_for_ours(overrides: Iterable[str]) -> bool:
    """Whether an override of the command line selects strategy megatrain."""
    return any(override.lstrip("+") in _CHOICES for override in overrides)


def _refuse_overrides(module: ModuleType) -> None:
    from hydra.errors import ConfigCompositionException

    def load_configuration(load, self, config_name, overrides, *args, **kwargs):
        if asks_for_ours(overrides):
            raise ConfigCompositionException(message())
        return load(self, config_name, overrides, *args, **kwargs)

    wrap(module.ConfigLoaderImpl, "load_configuration", load_configuration, patch=__name__)


def _refuse_config(module: ModuleType) -> None:
    def validate_config(validate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ours: set[str] = set()
        with contextlib.suppress(Exception):  # a config of another form is not ours to judge
            ours = our_roles(kwargs["config"] if "config" in kwargs else args[0])
        if ours:
            raise ValueError(message())
        return validate(*args, **kwargs)

    wrap(module, "validate_config", validate_config, patch=__name__)


def _refuse_engine(module: ModuleType) -> None:
    """Register an engine that refuses to be built, for trainers that check nothing before.

    VERL's SFT trainer with a config file is one.
    """

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise ValueError(message())

    refused = type("RefusedEngine", (module.BaseEngine,), {"__init__": refuse})
    module.EngineRegistry.register(model_type="language_model", backend=STRATEGY, device=["cuda", "cpu"])(refused)
