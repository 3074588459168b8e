"""Names that VERL looks up are looked up in the driver: a name that nobody has registered is refused.

What only the run's processes load may register more names. Where there is such a thing, a name that is not known here
may be known there, and passes. Called by algorithm.py and prepare.py.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

# VERL's own rollout engines; to ask for one of these would import it.
_ENGINES = ("vllm", "sglang", "trtllm")
# Files of the user's own, which may register names when VERL loads them.
_USERS_FILES = (
    "data.custom_cls.path", "reward.custom_reward_function.path", "reward.reward_manager.module.path",
    "trainer.v1.sampler.custom_sampler.path",
)  # fmt: skip


def check_parts(config: DictConfig) -> None:
    """Raise a ValueError for a rollout engine, a trainer or a reward manager that nobody has registered."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    setting, rollout = "actor_rollout_ref.rollout.name", config.actor_rollout_ref.rollout
    if OmegaConf.is_missing(rollout, "name") or not rollout.name:
        raise ValueError(f"{setting} is not set: set it to vllm (without a GPU: embedded)")
    if rollout.name not in _ENGINES and not may_be_registered(config, rollout.name):
        ask(setting, rollout.name, RolloutReplicaRegistry.get)
    mode = config.trainer.v1.trainer_mode
    if config.trainer.use_v1 and not may_be_registered(config, mode):
        from verl.trainer.ppo.v1 import get_trainer_cls

        ask("trainer.v1.trainer_mode", mode, get_trainer_cls)
    manager = config.reward.reward_manager
    if manager.source == "register" and not may_be_registered(config, manager.name):
        from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

        ask("reward.reward_manager.name", manager.name, get_reward_manager_cls)


def may_be_registered(config: DictConfig, name: str) -> bool:
    """Whether something that only the run's processes load may register `name`: modules, or a file that has it in
    quotes."""
    environment = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env") or {}
    variables = environment.get("env_vars") or {}
    if environment.get("py_executable") or {"VERL_USE_EXTERNAL_MODULES", "PYTHONPATH"} & set(variables):
        return True
    for setting in _USERS_FILES:
        given = OmegaConf.select(config, setting)
        path = Path(os.path.expanduser(str(given).removeprefix("file://"))) if given else None
        if path is not None and path.is_file():
            text = path.read_text(errors="replace")
            if f'"{name}"' in text or f"'{name}'" in text:
                return True
    return False


def ask(setting: str, name: str, use: Callable[[str], Any]) -> None:
    """Use `name` as VERL will; an error of VERL's becomes one that names the setting."""
    try:
        use(name)
    except (ValueError, TypeError, NotImplementedError, KeyError, AssertionError) as error:
        said = f": {error}" if str(error) else ""
        raise ValueError(f"{setting}={name}: VERL does not accept it{said}") from error
