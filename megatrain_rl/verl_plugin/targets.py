"""The names that the yaml files under configs/ give as `_target_`.

VERL imports this module wherever it builds a config, in the driver and in the worker. The import registers the plug-in,
even where VERL's entry points are switched off.
"""

from megatrain_rl.verl_plugin import register
from megatrain_rl.verl_plugin.config import (
    MegaTrainActorConfig,
    MegaTrainOptimizerConfig,
    critic_config,
    engine_config,
)

register.install()

__all__ = ["MegaTrainActorConfig", "MegaTrainOptimizerConfig", "critic_config", "engine_config"]
