"""Hydra finds our config groups, and the error for a misspelt knob names the nearest known one.

The search path is added in code: Hydra's own discovery of `hydra_plugins` packages does not see editable installs. The
check of knobs reads the overrides before Hydra composes, because Hydra's error for an unknown key names no known key.
Called by register.py.
"""

import re
from typing import Any

CONFIG_PACKAGE = "pkg://megatrain_rl.configs"

# The key of an override, without its +, ++ or ~ and without its value.
_KEY = re.compile(r"^(?:\+\+|\+|~)?([^=@]+)(?:@[^=]*)?(?:=.*)?$", re.DOTALL)
_RL_NODES = ("actor_rollout_ref.actor.megatrain.", "actor_rollout_ref.ref.megatrain.")


def add_search_path(plugins: Any) -> None:
    """Add our config groups to Hydra's search path. plugins: Hydra's `Plugins` object."""
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class MegaTrainSearchPath(SearchPathPlugin):
        def manipulate_search_path(self, search_path) -> None:
            search_path.append(provider="megatrain_rl", path=CONFIG_PACKAGE)

    plugins.register(MegaTrainSearchPath)


def check_overrides(overrides: list[str]) -> None:
    """Raise a ValueError for the first override that sets an unknown knob of ours, or one that users may not set."""
    keys = [match.group(1) for match in map(_KEY.match, overrides) if match]
    nodes = (*_RL_NODES, "engine.") if "engine=megatrain" in overrides else _RL_NODES
    for key in keys:
        for node in nodes:
            if key.startswith(node):
                # only now: the driver of another strategy's run imports nothing of ours
                from megatrain_rl.verl_plugin.config import DERIVED, check_engine_settings

                if key.removeprefix(node) in DERIVED:
                    raise ValueError(f"{key} follows from other settings and cannot be set")
                check_engine_settings({key.removeprefix(node).split(".")[0]: None}, prefix=node)
