"""Sizes, counts and other numbers of a run are looked at in the driver: one that cannot be meant is refused.

Without these checks VERL's processes end minutes after the start, or a run ends with exit code 0 and has trained
nothing. Called by prepare.py.
"""

import logging
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megatrain_rl.verl_plugin.config import adamw_config
from verl_patches.ours import is_ours

log = logging.getLogger(__name__)

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"

# Whole numbers of at least 1.
_COUNTS = (
    "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_epochs", f"{_ROLLOUT}.n", f"{_ROLLOUT}.prompt_length",
    f"{_ROLLOUT}.response_length", f"{_ROLLOUT}.max_num_seqs", f"{_ROLLOUT}.max_num_batched_tokens", f"{_ROLLOUT}.agent.num_workers",
    f"{_ROLLOUT}.val_kwargs.n", "reward.num_workers", "trainer.total_epochs",
)  # fmt: skip
# The same, or null.
_COUNTS_OR_NULL = (
    "data.gen_batch_size", "data.val_batch_size", f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{_REF}.log_prob_micro_batch_size_per_gpu", f"{_REF}.log_prob_max_token_len_per_gpu", "trainer.total_training_steps",
)  # fmt: skip
# Whole numbers, of which those below 1 switch something off.
_INTERVALS = ("trainer.save_freq", "trainer.test_freq")


def check_numbers(config: DictConfig) -> None:
    """Raise a ValueError for a number that VERL, the trainer or the rollout engine cannot run with."""
    for setting in _COUNTS:
        value = OmegaConf.select(config, setting)
        _require(_is_whole(value) and value > 0, setting, value, "must be a whole number above 0")
    for setting in _COUNTS_OR_NULL:
        value = OmegaConf.select(config, setting)
        _require(
            value is None or (_is_whole(value) and value > 0), setting, value, "must be a whole number above 0, or null"
        )
    for setting in _INTERVALS:
        value = OmegaConf.select(config, setting)
        _require(_is_whole(value), setting, value, "must be a whole number; -1 switches it off")
    _check_batches(config)
    _check_sampling(config.actor_rollout_ref.rollout)
    _check_micro_batches(config)
    if is_ours(config):
        _check_optimizer(config)


def _check_batches(config: DictConfig) -> None:
    """VERL's v1 trainer builds a batch from whole pieces of `gen_batch_size`, unless it sets this to 1 itself."""
    batch, piece = config.data.train_batch_size, config.data.get("gen_batch_size")
    refills = config.algorithm.filter_groups.enable or config.trainer.v1.sampler.get("sync_refill_failed_groups")
    if piece is None or not config.trainer.use_v1 or refills or config.trainer.v1.trainer_mode != "sync":
        return
    _require(
        batch % piece == 0, "data.gen_batch_size", piece,
        f"data.train_batch_size={batch} must be a multiple of it; set it to null",
    )  # fmt: skip


def _check_sampling(rollout: DictConfig) -> None:
    temperature = rollout.temperature
    _require(
        _is_number(temperature) and temperature > 0, f"{_ROLLOUT}.temperature", temperature,
        "must be above 0: log-probs are those at the temperature that answers are sampled at",
    )  # fmt: skip
    tokens, sequences = rollout.max_num_batched_tokens, rollout.max_num_seqs
    _require(
        tokens >= sequences, f"{_ROLLOUT}.max_num_batched_tokens", tokens,
        f"must be at least {_ROLLOUT}.max_num_seqs={sequences}, as vLLM asks for",
    )  # fmt: skip
    whole = {"top_p": rollout.top_p in (None, 1), "top_k": (rollout.top_k or -1) <= 0}
    whole["repetition_penalty"] = rollout.get("repetition_penalty", 1) in (None, 1)
    for name in (name for name, is_whole in whole.items() if not is_whole):
        log.warning(
            "%s.%s=%s: answers are sampled from a changed distribution, and the trainer's log-probs are those of the "
            "unchanged one", _ROLLOUT, name, rollout[name],
        )  # fmt: skip


def _check_micro_batches(config: DictConfig) -> None:
    """VERL's worker asserts that both passes over a batch are cut alike, and that each has its size."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    setting, cut = f"{_ROLLOUT}.log_prob_use_dynamic_bsz", rollout.log_prob_use_dynamic_bsz
    _require(
        cut == actor.use_dynamic_bsz, setting, cut,
        f"must be the same as {_ACTOR}.use_dynamic_bsz={actor.use_dynamic_bsz}",
    )  # fmt: skip
    pair = ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu")
    if not actor.use_dynamic_bsz:
        pair = ("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu")
    for setting in (f"{_ACTOR}.{pair[0]}", f"{_ROLLOUT}.{pair[1]}"):
        value = OmegaConf.select(config, setting)
        _require(value is not None, setting, value, f"set it, or {_ACTOR}.use_dynamic_bsz to the other value")


def _check_optimizer(config: DictConfig) -> None:
    from hydra.errors import InstantiationException
    from verl.utils.config import omega_conf_to_dataclass

    try:
        adamw_config(omega_conf_to_dataclass(config.actor_rollout_ref.actor.optim))
    except (ValueError, TypeError, InstantiationException) as error:
        said = error.__cause__ or error  # Hydra wraps the error of the class that it builds
        kind = config.actor_rollout_ref.actor.optim.lr_scheduler_type
        unsaid = f"VERL does not accept it (lr_scheduler_type={kind}, for one, must be constant or cosine)"
        raise ValueError(f"{_ACTOR}.optim: {str(said) or unsaid}") from error


def _require(condition: bool, setting: str, value: Any, instead: str) -> None:
    if not condition:
        raise ValueError(f"{setting}={value}: {instead}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
