"""The error for a misspelt setting of ours names the nearest known setting.

Symptom: `actor_rollout_ref.actor.megatrain.rng_depth=3` ends with Hydra's "Could not override", which names no known
    key.
Cause: Hydra merges overrides by key, and a config group cannot add a check of its own.
Upstream: hydra-core 1.3, _internal/config_loader_impl.py, ConfigLoaderImpl.load_configuration. No issue known.
Remove when: Hydra's message names the nearest key.
"""

from collections.abc import Callable
from types import ModuleType

from verl_patches.wrap import wrap

MODULE = "hydra._internal.config_loader_impl"
VERSIONS = {"hydra-core": ">=1.3,<1.4"}


def apply(module: ModuleType, check: Callable[[list[str]], None]) -> None:
    """Have `check` called with the overrides of every composition.

    A ValueError from `check` becomes Hydra's own kind of error, so that the user sees one line at the end.
    """
    from hydra.errors import ConfigCompositionException

    def load_configuration(load, self, config_name, overrides, *args, **kwargs):
        try:
            check(overrides)
        except ValueError as error:
            raise ConfigCompositionException(str(error)) from None
        return load(self, config_name, overrides, *args, **kwargs)

    wrap(module.ConfigLoaderImpl, "load_configuration", load_configuration, patch=__name__)
