"""VERL's loss function as this package's `Objective`, so that the update does not depend on how packs are cut.

VERL's function is called unchanged. A separable loss (see separable.py) is called once per pack, with that pack's rows,
counts of the whole mini-batch (`batch_num_tokens`, `global_batch_size`) and one padded width of the responses, by which
`seq-mean-token-sum-norm` divides. Any other loss is called once per mini-batch, on log-probs of a forward of its own;
its gradient by log-probs and entropies is then all that the packs need. Metrics are always those of one call with the
whole mini-batch: VERL takes means over a micro-batch, and means of packs' means would depend on the cut.

Called by engine.py from one thread, because VERL's loss writes into its actor config.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss, sft_loss

from megatrain_rl.batch import PackedBatch
from megatrain_rl.objectives import ObjectiveOutput, TokenStats
from megatrain_rl.verl_plugin.engine import batch
from megatrain_rl.verl_plugin.engine.batch import MiniBatch
from megatrain_rl.verl_plugin.engine.separable import describe, is_separable, unbound

logger = logging.getLogger(__name__)

LossFunction = Callable[..., tuple[Tensor, dict]]


def predict_mask(data: TensorDict, loss_function: LossFunction | None) -> list[Tensor]:
    """Per row, bool: true at the positions whose log-probs are needed.

    For a loss of VERL's own these are the positions that it counts; without a loss, those that VERL's RL trainers read.
    Another loss function gets every position.
    """
    function, _ = unbound(loss_function)
    if function is ppo_loss:
        return batch.at_response_mask(data)
    if function is sft_loss:
        return batch.at_loss_mask(data)
    if function is None and batch.has_responses(data):
        return batch.at_responses(data)
    return batch.everywhere(data)


@functools.cache  # once, not in every step
def _tell_of_a_forward_more(loss: str) -> None:
    logger.warning(
        "%s: the losses of micro-batches do not add up to the mini-batch's, or are not known to; every update runs one "
        "more forward, and the loss once on the log-probs of the whole mini-batch",
        loss,
    )


class VerlObjective:
    """`loss_function` over the mini-batch `data`; called as an objective, it is the loss of one pack.

    mini_batch: the rows of `data`. The counts that VERL's losses divide by are written into `data`.
    entropy: whether the loss function is handed the entropies, where there are some.
    old_is_own: whether the old log-probs are those that the loss function is called with, see on_policy.py.
    separable: whether the losses of packs add up to the mini-batch's. Without, packs are to get `linearised` instead.
    """

    def __init__(
        self,
        loss_function: LossFunction,
        data: TensorDict,
        mini_batch: MiniBatch,
        group: torch.distributed.ProcessGroup,
        *,
        entropy: bool = True,
        old_is_own: bool = False,
    ):
        self._loss_function = loss_function
        self._entropy = entropy
        self._old_is_own = old_is_own
        self._mini_batch = mini_batch
        self._group = group
        function, _ = unbound(loss_function)
        # VERL's own losses count predicted tokens only, see `predict_mask`; where there are none they divide by 0
        self._counts_predicted = function in (ppo_loss, sft_loss)
        self.separable = is_separable(loss_function)
        if not self.separable:
            _tell_of_a_forward_more(describe(loss_function))
        # a mini-batch without a single counted token has loss 0, not 0/0
        tu.assign_non_tensor(data, batch_num_tokens=max(1, int(data["loss_mask"].sum())), dp_size=1, sp_size=1)
        self._data = _dense_responses(data) if function is ppo_loss else data

    def __call__(self, stats: TokenStats, pack: PackedBatch) -> ObjectiveOutput:
        device = stats.log_probs_T.device
        if self._counts_nothing([pack]):
            return ObjectiveOutput(loss=torch.zeros((), device=device))
        rows = batch.select_rows(self._data, pack.sequence_ids).to(device)
        offsets = pack.cu_seqlens.to(device=device, dtype=torch.int64)
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(stats.log_probs_T, offsets=offsets)}
        if stats.entropy_T is not None:
            output["entropy"] = torch.nested.nested_tensor_from_jagged(stats.entropy_T, offsets=offsets)
        return self._called(output, rows)

    def whole(self, stats: list[TokenStats], packs: Sequence[PackedBatch]) -> ObjectiveOutput:
        """Loss and metrics of one call with the whole mini-batch. stats: of each pack, on the CPU."""
        if self._counts_nothing(packs):
            return ObjectiveOutput(loss=torch.zeros(()))
        return self._called(self._mini_batch.model_output(stats, list(packs)), self._data.copy())

    def _called(self, output: dict[str, Tensor], rows: TensorDict) -> ObjectiveOutput:
        if not self._entropy:
            output.pop("entropy", None)
        if self._old_is_own:
            rows["old_log_probs"] = batch.of_responses(output["log_probs"].detach(), rows)
        loss, metrics = self._loss_function(model_output=output, data=rows, dp_group=self._group)
        return ObjectiveOutput(loss=loss, metrics=metrics)

    def linearised(self, stats: list[TokenStats], packs: Sequence[PackedBatch]) -> "LinearisedLoss":
        """The mini-batch's loss at `stats`, as an objective of packs."""
        leaves = [each.detach() for each in stats]
        tensors = [value_T for each in leaves for value_T in (each.log_probs_T, each.entropy_T) if value_T is not None]
        with torch.enable_grad():
            for value_T in tensors:
                value_T.requires_grad_()
            whole = self.whole(leaves, packs)
            if whole.loss.requires_grad:
                whole.loss.backward()
        return LinearisedLoss(whole, leaves, packs)

    def _counts_nothing(self, packs: Sequence[PackedBatch]) -> bool:
        return self._counts_predicted and not any(bool(pack.predict_T.any()) for pack in packs)


class LinearisedLoss:
    """An objective with the gradient that a mini-batch's loss has at known statistics; packs' losses add up to it.

    whole: that loss and its metrics. leaves: the statistics of each pack, on the CPU, with the loss's gradients.
    """

    def __init__(self, whole: ObjectiveOutput, leaves: list[TokenStats], packs: Sequence[PackedBatch]):
        self.metrics = whole.metrics
        self._share = float(whole.loss) / max(1, len(packs))
        self._leaves = {pack.sequence_ids: each for pack, each in zip(packs, leaves, strict=True)}

    def __call__(self, stats: TokenStats, pack: PackedBatch) -> ObjectiveOutput:
        leaves = self._leaves[pack.sequence_ids]
        linear = _slope(stats.log_probs_T, leaves.log_probs_T)
        if stats.entropy_T is not None and leaves.entropy_T is not None and leaves.entropy_T.grad is not None:
            linear = linear + _slope(stats.entropy_T, leaves.entropy_T)
        # the sum's value has no meaning, only its gradient; one that is not finite stays so and stops the step
        return ObjectiveOutput(loss=linear - linear.detach() + self._share)


def _slope(values_T: Tensor, leaf_T: Tensor) -> Tensor:
    gradient_T = torch.zeros_like(leaf_T) if leaf_T.grad is None else leaf_T.grad
    return (values_T * gradient_T.to(values_T.device)).sum()


def _dense_responses(data: TensorDict) -> TensorDict:
    """A copy of `data` with response fields padded to the mini-batch's longest response, and 0 wherever the mask is 0.

    VERL's policy loss pads to the longest response that it is handed, which would be the pack's. Values at masked
    positions have no meaning, but a NaN there, multiplied by a zero gradient, could still reach the weights.
    """
    responses = data["responses"]
    lengths = batch.response_lengths(data)
    width = max(lengths) if responses.is_nested else responses.shape[1]
    fields = {key: value for key, value in data.items() if isinstance(value, Tensor) and key != "responses"}
    dense = {}
    for key, value in fields.items():
        if value.is_nested and value.dim() == 2 and batch.jagged_lengths(value) == lengths and key != "prompts":
            dense[key] = torch.nested.to_padded_tensor(value, padding=0, output_size=(len(lengths), width))
        elif not value.is_nested and value.shape == (len(lengths), width):
            dense[key] = value
    mask = dense["response_mask"].bool()
    for key, value in dense.items():
        if value.is_floating_point():
            dense[key] = value.masked_fill(~mask, 0)
    result = data.copy()
    result.update(dense)
    tu.assign_non_tensor_data(result, "max_response_len", width)
    return result
