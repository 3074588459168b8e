"""What a run would find out minutes after its start, or never: asked in the driver, before Ray starts. Called by preflight.py."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

AUTO = "auto"
_CONTEXT = "actor_rollout_ref.rollout.max_model_len"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


def resolve_context(config: DictConfig) -> None:
    """`max_model_len=auto` is the longest prompt and answer together; a length set by hand must hold them, or VERL would cut the answers
    and train on them as if they had ended."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    longest = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len == AUTO:
        with open_dict(rollout):
            rollout.max_model_len = longest
    elif rollout.max_model_len is not None and rollout.max_model_len < longest:
        raise ValueError(
            f"{_CONTEXT}={rollout.max_model_len} is less than data.max_prompt_length + data.max_response_length = {longest}: answers would be "
            f"cut short; set {_CONTEXT}={AUTO}"
        )


def check_mini_batch(config: DictConfig) -> None:
    """VERL fills a batch up to whole mini-batches with rows of padding, which then count in means over sequences."""
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch % mini:
        raise ValueError(
            f"data.train_batch_size={batch} is no multiple of {_MINI_BATCH}={mini} (both in prompts): the last mini-batch of every step would "
            f"be filled up with padding; change one of them"
        )


def check_loggers(config: DictConfig) -> None:
    """VERL makes its loggers when everything else is up."""
    from verl.utils.tracking import Tracking

    wanted = config.trainer.logger
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    known = [*Tracking.supported_backend, "tracking"]
    for name in wanted:
        if name not in known:
            raise ValueError(
                f"trainer.logger has {name}, which VERL does not know; it knows {', '.join(sorted(known))}"
            )
    for name, module in (("wandb", "wandb"), ("tracking", "wandb"), ("tensorboard", "tensorboard")):
        if name in wanted and importlib.util.find_spec(module) is None:
            raise ValueError(
                f"trainer.logger has {name}, and {module} is not installed: pip install {module}, or leave it out"
            )
    if {"wandb", "tracking"} & set(wanted) and _wandb_has_no_key():
        raise ValueError(
            "trainer.logger has wandb, which knows no API key and cannot ask for one in a run: set WANDB_API_KEY, call `wandb login`, or "
            "set WANDB_MODE=offline"
        )


# In a process of its own: wandb leaves a service running, and its address in the environment. Exit status 1: there is no key.
_ASK_WANDB = """
import inspect, sys, wandb
settings = wandb.setup().settings  # also of files
if settings.mode in ("offline", "disabled", "dryrun") or settings.api_key or "prompt" not in inspect.signature(wandb.login).parameters:
    sys.exit(0)
sys.exit(0 if wandb.login(prompt=False, verify=False) else 1)
"""


def _wandb_has_no_key() -> bool:
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return False
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_WANDB], capture_output=True, stdin=subprocess.DEVNULL, timeout=30
        )
    except subprocess.TimeoutExpired:
        return False  # no answer is no reason to refuse a run
    return asked.returncode == 1 and b"Traceback" not in asked.stderr


def check_disk(config: DictConfig) -> None:
    """The first checkpoint fits, as far as the model's size can be told here: VERL saves after `save_freq` steps of work."""
    if config.trainer.save_freq <= 0 or config.actor_rollout_ref.actor.strategy != "megatrain":
        return
    folder = Path(os.path.expanduser(str(config.trainer.default_local_dir))).absolute()
    if next(folder.glob("global_step_*"), None) is not None:
        return  # going on from one: what it takes is on the disk already, and may be replaced
    needed = checkpoint_bytes(config)
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    total, _, free = shutil.disk_usage(there)
    if needed is not None and total and needed > free:
        raise ValueError(
            f"trainer.default_local_dir={config.trainer.default_local_dir}: a checkpoint takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are "
            "free there: make room, set it to another disk, or set trainer.save_freq=-1"
        )


def checkpoint_bytes(config: DictConfig) -> int | None:
    """Of a complete state, after the configuration of a local model; None for a model that is not here yet."""
    model = Path(os.path.expanduser(str(config.actor_rollout_ref.model.path)))
    if not (model / "config.json").is_file():
        return None
    from transformers import AutoConfig

    from megatrain_rl.model.decoder import decoder_spec

    try:
        parameters = decoder_spec(AutoConfig.from_pretrained(model)).num_parameters
    except ValueError:  # a model that is not supported: told by who loads it
        return None
    knobs = OmegaConf.select(config, "actor_rollout_ref.actor.megatrain") or {}
    moments = 4 if knobs.get("optimizer_state_dtype", "float32") == "bfloat16" else 8
    return parameters * (4 + moments)  # weights and residual, or a weight in fp32
