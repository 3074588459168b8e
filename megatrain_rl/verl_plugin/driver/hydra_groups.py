"""Hydra sees our config groups, and a misspelt knob is told its nearest neighbour.

The search path is added in code: Hydra's own discovery of `hydra_plugins` packages does not see editable installs. The
knob check reads the overrides before composition, because Hydra's answer to an unknown key names no known one. Called by
register.py only.
"""

import re
from types import ModuleType

CONFIG_PACKAGE = "pkg://megatrain_rl.configs"

# key of an override without its +, ++ or ~ and without its value
_KEY = re.compile(r"^(?:\+\+|\+|~)?([^=@]+)(?:@[^=]*)?(?:=.*)?$", re.DOTALL)
_RL_NODES = ("actor_rollout_ref.actor.megatrain.", "actor_rollout_ref.ref.megatrain.")

# Keys that the yaml files fill in from VERL's own settings; set by hand they could only contradict these.
_NOT_KNOBS = (
    "strategy",
    "forward_only",
    "reference_for_kl_loss",
    "reference_for_kl_in_reward",
    "sync_bucket_megabytes",
)


def install(on_import) -> None:
    on_import("hydra.core.plugins", _add_search_path)
    on_import("hydra._internal.config_loader_impl", _check_overrides_first)


def _add_search_path(module: ModuleType) -> None:
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class MegaTrainSearchPath(SearchPathPlugin):
        def manipulate_search_path(self, search_path) -> None:
            search_path.append(provider="megatrain_rl", path=CONFIG_PACKAGE)

    module.Plugins.instance().register(MegaTrainSearchPath)


def _check_overrides_first(module: ModuleType) -> None:
    from hydra.errors import ConfigCompositionException

    load = module.ConfigLoaderImpl.load_configuration

    def load_configuration(self, config_name, overrides, *args, **kwargs):
        try:
            check_overrides(overrides)
        except ValueError as error:
            raise ConfigCompositionException(str(error)) from None
        return load(self, config_name, overrides, *args, **kwargs)

    module.ConfigLoaderImpl.load_configuration = load_configuration


def check_overrides(overrides: list[str]) -> None:
    """Raise a ValueError for the first override that sets an unknown knob of ours."""
    keys = [match.group(1) for match in map(_KEY.match, overrides) if match]
    sft = "engine=megatrain" in overrides
    nodes = (*_RL_NODES, "engine.") if sft else _RL_NODES
    for key in keys:
        for node in nodes:
            if key.startswith(node):
                from megatrain_rl.verl_plugin.config import check_engine_settings

                if key.removeprefix(node) in _NOT_KNOBS:
                    raise ValueError(f"{key} follows from other settings and cannot be set")
                check_engine_settings({key.removeprefix(node).split(".")[0]: None}, prefix=node)
