"""VERL's estimator, correction and policy loss are called once in the driver, with the run's settings and made-up rows.

VERL checks the values of their settings where they are used, which is in the first step, minutes after the start. What
fails there fails here. Functions of a user's own may want other data, and are not called. Called by algorithm.py.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from megatrain_rl.verl_plugin.registered import is_verls_own

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
_TOKENS = 3  # of an answer


def check_estimator(config: DictConfig) -> None:
    """Raise a ValueError if VERL's advantage estimator cannot do with what a step hands it."""
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.ray_trainer import compute_advantage

    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    estimator = core_algos.ADV_ESTIMATOR_REGISTRY.get(algorithm.adv_estimator)
    if estimator is None or not is_verls_own(estimator):
        return
    rows = _rows(2 * n)
    rewards = rows["response_mask"] * torch.arange(2.0 * n)[:, None]
    tensors = {**rows, "token_level_rewards": rewards, "token_level_scores": rewards}
    others = {"uid": np.repeat(np.array(["a", "b"], dtype=object), n)}
    if not config.trainer.use_v1:  # the v1 trainer hands over nothing else
        ones = torch.ones(2 * n, 2 * _TOKENS)
        tensors |= {"prompts": ones[:, :_TOKENS], "attention_mask": ones.long(), "reward_baselines": rewards.sum(dim=1)}
        others |= {key: np.arange(2.0 * n) for key in algorithm.get("gdpo_reward_keys") or ()}
    _call(
        f"algorithm.adv_estimator={algorithm.adv_estimator} (with actor_rollout_ref.rollout.n={n})",
        lambda: compute_advantage(
            DataProto.from_dict(tensors=tensors, non_tensors=others),
            adv_estimator=algorithm.adv_estimator,
            num_repeat=n,
            config=algorithm,
        ),
    )


def check_correction(config: DictConfig) -> None:
    """Raise a ValueError for a correction of the rollout that VERL does not know, or that would lack its log-probs."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    wanted = config.algorithm.get("rollout_correction")
    if wanted is None:
        return
    asked = [key for key in ("rollout_is", "rollout_rs", "bypass_mode") if wanted.get(key)]
    if asked and not config.actor_rollout_ref.rollout.calculate_log_probs:
        # VERL leaves a correction out without a word, and bypass mode ends in the first step
        raise ValueError(
            f"{_CORRECTION}.{asked[0]}={wanted[asked[0]]} needs the rollout engine's log-probs: set {_LOG_PROBS}=true"
        )
    rows = {**_rows(2), "rollout_log_probs": torch.full((2, _TOKENS), -1.5)}
    _call(_CORRECTION, lambda: compute_rollout_correction_and_add_to_batch(DataProto.from_dict(tensors=rows), wanted))


def check_loss(config: DictConfig) -> None:
    """Raise a ValueError if VERL's policy loss refuses the actor's settings, or has no finite value with them."""
    from verl.trainer.ppo import core_algos
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    mode = actor.policy_loss.loss_mode
    loss: Callable[..., Any] | None = core_algos.POLICY_LOSS_REGISTRY.get(mode)
    if loss is None or not is_verls_own(loss):
        return
    rows = _rows(2)
    counts = {"dp_size": 1, "batch_num_tokens": 2 * _TOKENS, "global_batch_size": 2}
    actor.global_batch_info.update(counts, loss_scale_factor=actor.loss_scale_factor)

    def once() -> None:
        value, _ = loss(
            old_log_prob=rows["old_log_probs"],
            log_prob=(rows["old_log_probs"] + 0.01).requires_grad_(),
            advantages=torch.tensor([[1.0], [-1.0]]).expand(2, _TOKENS),
            response_mask=rows["response_mask"],
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )
        if not math.isfinite(value.item()):
            raise ValueError(f"it has the value {value.item()}; see loss_scale_factor and the clip ratios")

    _call(f"{_ACTOR}.policy_loss.loss_mode={mode} with the settings of {_ACTOR}", once)


def _rows(count: int) -> dict[str, Tensor]:
    return {
        "response_mask": torch.ones(count, _TOKENS),
        "responses": torch.ones(count, _TOKENS, dtype=torch.int64),
        "old_log_probs": torch.full((count, _TOKENS), -1.4),
    }


def _call(setting: str, use: Callable[[], Any]) -> None:
    try:
        use()
    except Exception as error:  # whatever it is, it would end the run's first step
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{setting}: VERL cannot compute it: {said}") from error
