"""On a VERL that was not tested, a run of ours is refused in one line, and no other run notices the plug-in.

Symptom: none upstream; a plug-in on a VERL whose fields have moved would train with what it misreads.
Cause: VERL loads every installed plug-in, whatever version either has.
Upstream: verl, __init__.py, entry points of the group `verl.plugins`.
Remove when: never; it is the other side of every gate.

Nothing may fail here for runs of others: a name that is missing in that version is passed over.
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
    found = versions.installed("verl") or "of unknown version"
    return (
        f"strategy {STRATEGY} is tested with verl{versions.TESTED_VERL} and the installed verl is {found}: "
        f"pip install 'verl{versions.TESTED_VERL}', or choose another strategy"
    )


def install(on_import: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
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
    def validate_config(validate, *args, **kwargs):
        ours: set[str] = set()
        with contextlib.suppress(Exception):  # a config of another form is not ours to judge
            ours = our_roles(kwargs["config"] if "config" in kwargs else args[0])
        if ours:
            raise ValueError(message())
        return validate(*args, **kwargs)

    wrap(module, "validate_config", validate_config, patch=__name__)


def _refuse_engine(module: ModuleType) -> None:
    """For trainers that check nothing before, as VERL's SFT trainer on a config file."""

    class RefusedEngine(module.BaseEngine):
        def __init__(self, *args: Any, **kwargs: Any):
            raise ValueError(message())

    module.EngineRegistry.register(model_type="language_model", backend=STRATEGY, device=["cuda", "cpu"])(RefusedEngine)
