"""A run's loggers, context, mini-batches and disk are checked in the driver, before Ray starts.

Without these checks the run would fail minutes after its start, or would train on something else than was meant.
Called by prepare.py.
"""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from megatrain_rl.config import StreamConfig
from megatrain_rl.verl_plugin import supported
from megatrain_rl.verl_plugin.driver.files import output_folder
from megatrain_rl.verl_plugin.driver.gpu_share import AUTO, model_folder
from verl_patches.ours import is_ours

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

_ROLLOUT = "actor_rollout_ref.rollout"
_CONTEXT = f"{_ROLLOUT}.max_model_len"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
# The environment that Ray gives to its processes, among them the one that logs.
_RUNTIME_ENV = "ray_kwargs.ray_init.runtime_env"


def check_context(config: DictConfig) -> None:
    """Raise a ValueError if a context set by hand does not hold the longest prompt and answer together.

    VERL would cut the answers and train on them as if they had ended.
    """
    given, longest = config.actor_rollout_ref.rollout.max_model_len, _longest(config)
    if given not in (None, AUTO) and given < longest and is_ours(config):
        raise ValueError(
            f"{_CONTEXT}={given} is less than {_ROLLOUT}.prompt_length + response_length = {longest} "
            "(data.max_prompt_length, data.max_response_length): answers would be cut short; "
            f"set {_CONTEXT}={AUTO}, or null for all of the model's positions"
        )


def context(config: DictConfig) -> int | None:
    """The rollout engine's context in tokens, None to leave it to VERL, which takes all of the model's positions.

    `auto` stands for the longest prompt and answer together, but no more than the model's positions.
    """
    given, longest = config.actor_rollout_ref.rollout.max_model_len, _longest(config)
    if given != AUTO:
        return given
    positions = _positions(config)
    if positions is None:
        return longest
    if positions < longest:
        log.warning(
            "%s + %s is %d, and the model has %d positions: answers to long prompts will be cut short",
            f"{_ROLLOUT}.prompt_length", "response_length", longest, positions,
        )  # fmt: skip
    return min(longest, positions)


def _longest(config: DictConfig) -> int:
    rollout = config.actor_rollout_ref.rollout
    return rollout.prompt_length + rollout.response_length


def check_model_code(config: DictConfig) -> None:
    """Raise a ValueError if a local model is to be run by code of its own folder."""
    model = _local_model(config)
    if model is not None and is_ours(config):
        supported.check_model_code(model, trusted=config.actor_rollout_ref.model.trust_remote_code)


def check_mini_batch(config: DictConfig) -> None:
    """Raise a ValueError if the last mini-batch of a step would be filled up and the loss is a mean over sequences.

    VERL fills a batch up to whole mini-batches with rows of padding, and such a mean counts them.
    """
    actor = config.actor_rollout_ref.actor
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if batch % mini and str(actor.loss_agg_mode).startswith("seq-mean") and _trains(config):
        raise ValueError(
            f"data.train_batch_size={batch} is no multiple of {_MINI_BATCH}={mini} (both in prompts): the last "
            f"mini-batch of a step would be filled up with padding, which counts in {actor.loss_agg_mode}; "
            "change one of them"
        )


def _trains(config: DictConfig) -> bool:
    return is_ours(config) and not (
        config.trainer.get("val_only", False) and config.trainer.get("val_before_train", True)
    )


def check_loggers(config: DictConfig) -> None:
    """Raise a ValueError for a logger that is unknown, not installed, or wandb without a key.

    VERL makes its loggers only when everything else is up.
    """
    from verl.utils.tracking import Tracking

    wanted = config.trainer.logger
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    known = [*Tracking.supported_backend, "tracking"]
    for name in wanted:
        if name not in known:
            raise ValueError(
                f"trainer.logger has {name}, which VERL does not know; it knows {', '.join(sorted(known))}"
            )
    if OmegaConf.select(config, f"{_RUNTIME_ENV}.py_executable"):
        return  # another interpreter logs
    for name, module in (("wandb", "wandb"), ("tracking", "wandb"), ("tensorboard", "tensorboard")):
        if name in wanted and importlib.util.find_spec(module) is None:
            raise ValueError(
                f"trainer.logger has {name}, and {module} is not installed: pip install {module}, or leave it out"
            )
    given = OmegaConf.select(config, f"{_RUNTIME_ENV}.env_vars") or {}
    environment = os.environ | {str(name): str(value) for name, value in given.items()}
    if {"wandb", "tracking"} & set(wanted) and _wandb_has_no_key(environment):
        raise ValueError(
            "trainer.logger has wandb, which knows no API key and cannot ask for one in a run: set WANDB_API_KEY, "
            "call `wandb login`, or set WANDB_MODE=offline"
        )


# This runs in a process of its own, because wandb leaves a service running and its address in the environment. It exits
# with status 1 if there is no key.
_ASK_WANDB = """
import inspect, sys, wandb
settings = wandb.setup().settings  # also of files
cannot_ask = "prompt" not in inspect.signature(wandb.login).parameters
if settings.mode in ("offline", "disabled", "dryrun") or settings.api_key or cannot_ask:
    sys.exit(0)
sys.exit(0 if wandb.login(prompt=False, verify=False) else 1)
"""


def _wandb_has_no_key(environment: dict[str, str]) -> bool:
    if environment.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or environment.get("WANDB_API_KEY"):
        return False
    command = [sys.executable, "-c", _ASK_WANDB]
    try:
        asked = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=environment, timeout=60)
    except subprocess.TimeoutExpired:
        return False  # no answer is no reason to refuse a run
    return asked.returncode == 1 and b"Traceback" not in asked.stderr


def check_disk(config: DictConfig) -> None:
    """Raise a ValueError if the first checkpoint does not fit on the disk, as far as the model's size is known here.

    VERL saves after `save_freq` steps, and the work of these steps would be lost.
    """
    if config.trainer.save_freq <= 0 or not _trains(config):
        return
    folder = output_folder(config)
    if next(folder.glob("global_step_*"), None) is not None:
        return  # the run goes on from a checkpoint: its bytes are on the disk already, and may be replaced
    needed = checkpoint_bytes(config)
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    total, _, free = shutil.disk_usage(there)
    if needed is not None and total and needed > free:
        raise ValueError(
            f"trainer.default_local_dir={config.trainer.default_local_dir}: a checkpoint takes {needed / 1e9:.1f} GB "
            f"and {free / 1e9:.1f} GB are free there: make room, set it to another disk, or set trainer.save_freq=-1"
        )


def checkpoint_bytes(config: DictConfig) -> int | None:
    """The bytes of a checkpoint with the complete training state; None if the model is not local yet."""
    from megatrain_rl.model.decoder import decoder_spec
    from megatrain_rl.planner import state_bytes_per_parameter

    model = _local_model(config)
    if model is None:
        return None
    try:
        parameters = decoder_spec(model).num_parameters
    except ValueError:  # the model is not supported: whoever loads it says so
        return None
    knobs = OmegaConf.select(config, "actor_rollout_ref.actor.megatrain") or {}
    dtypes = {name: knobs[name] for name in ("param_dtype", "optimizer_state_dtype") if name in knobs}
    return parameters * state_bytes_per_parameter(StreamConfig(**dtypes))


def _positions(config: DictConfig) -> int | None:
    """How many positions a local model has, as VERL reads it from the model's config; None if unknown here."""
    from verl.workers.rollout.utils import get_max_position_embeddings

    model = _local_model(config)
    if model is None or OmegaConf.select(config, "actor_rollout_ref.model.override_config"):
        return None
    try:
        return get_max_position_embeddings(model)
    except ValueError:
        return None


def _local_model(config: DictConfig) -> "PretrainedConfig | None":
    folder = model_folder(config)
    if not (folder / "config.json").is_file():
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError):  # whoever loads the model says so
        return None
