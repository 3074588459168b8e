"""Old log-probs without a pass of their own, where the one update of a batch computes the same numbers.

PPO's old policy is the policy before the first update on a batch. Where one update is all that a batch gets (one
mini-batch, one epoch), the weights are still the old ones while it runs: its own log-probs, detached, are the old ones.
Nothing is approximated; the ratio of new to old is 1 exactly. VERL would run a forward over the batch for them.

The trainer (task_runner/trainer.py) asks for it batch by batch; the engine (engine/engine.py) hands VERL's loss its own
log-probs and returns, beside the update's metrics, those that VERL computes from the pass that is left out.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.workers.utils.padding import response_from_nested

from megatrain_rl.verl_plugin.monitoring import log_prob_gap

# In the extra information of a batch, which reaches the engine with it: what to compute from the update's log-probs.
KEY = "megatrain_old_log_probs_of_update"
# What the engine returns has this before its name: VERL puts "actor/" before the metrics of an update.
PREFIX = "of_update/"
# A correction without weights and without rejection: VERL computes its metrics alone.
_ONLY_METRICS = RolloutCorrectionConfig(rollout_is=None, rollout_rs=None)


def one_update(config: DictConfig, rows: int) -> bool:
    """Whether a batch of so many rows gets one update, and nothing before the update reads the old log-probs."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.get("rollout_correction") or {}
    correction_reads = any(correction.get(key) for key in ("bypass_mode", "rollout_is", "rollout_rs"))
    if algorithm.use_kl_in_reward or correction_reads:
        return False
    mini_batch = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    return actor.ppo_epochs == 1 and rows == mini_batch


def wanted(config: DictConfig) -> dict[str, Any]:
    """What goes with the batch under KEY: which metrics of VERL's pass the engine computes, and how."""
    actor = config.actor_rollout_ref.actor
    has_rollouts = bool(config.actor_rollout_ref.rollout.calculate_log_probs)
    return {
        "loss_agg_mode": actor.loss_agg_mode,
        "loss_scale_factor": actor.loss_scale_factor,
        "gap": has_rollouts,
        "correction": has_rollouts and config.algorithm.get("rollout_correction") is not None,
    }


@contextlib.contextmanager
def without_correction(config: DictConfig) -> Iterator[None]:
    """Within, VERL computes no metrics of the rollout correction, whose old log-probs are not there yet."""
    algorithm = config.algorithm
    given = algorithm.get("rollout_correction")
    with open_dict(algorithm):
        algorithm.rollout_correction = None
        try:
            yield
        finally:
            algorithm.rollout_correction = given


def asked(data: TensorDict) -> dict[str, Any] | None:
    """What the trainer has put beside the batch; None if the old log-probs are in the batch, as usual."""
    given = tu.get_non_tensor_data(data=data, key=KEY, default=None)
    return None if given is None else dict(given)


def metrics(model_output: Mapping[str, Tensor], data: TensorDict, how: Mapping[str, Any]) -> dict[str, list[float]]:
    """What VERL logs from the pass: the mean entropy, the gap between rollout and trainer, metrics of the correction.

    model_output: log_probs and entropy of the mini-batch `data`, jagged, in row order. how: of `wanted`. A list of
    one number each, for VERL takes means over the mini-batches of an update.
    """
    mask = data["response_mask"]
    fields = {"response_mask": mask, "responses": data["responses"]}
    if how["gap"]:
        fields["rollout_log_probs"] = data["rollout_log_probs"]
    fields["old_log_probs"] = response_from_nested(model_output["log_probs"].detach(), mask)
    fields["entropy"] = response_from_nested(model_output["entropy"].detach(), mask)
    padded = DataProto(batch=TensorDict(fields, batch_size=len(mask.offsets()) - 1).to_padded_tensor())
    entropy = agg_loss(
        loss_mat=padded.batch["entropy"],
        loss_mask=padded.batch["response_mask"],
        loss_agg_mode=how["loss_agg_mode"],
        loss_scale_factor=how["loss_scale_factor"],
    )
    found = {"actor/entropy": entropy.item()}
    if how["gap"]:
        rollout, old = padded.batch["rollout_log_probs"], padded.batch["old_log_probs"]
        found |= calculate_debug_metrics(padded)
        found |= log_prob_gap(rollout, old, padded.batch["response_mask"])
    if how["correction"]:
        found |= compute_rollout_correction_and_add_to_batch(padded, _ONLY_METRICS)[1]
    return {f"{PREFIX}{name}": [value] for name, value in found.items()}


def rename(logged: dict[str, Any]) -> None:
    """Give the metrics of an update that came from the engine the names that VERL has for them."""
    prefix = f"actor/{PREFIX}"
    for name in [name for name in logged if name.startswith(prefix)]:
        logged[name.removeprefix(prefix)] = logged.pop(name)
