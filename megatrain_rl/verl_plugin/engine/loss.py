"""VERL's loss function as this package's `Objective`. It is called unchanged, once per pack, with that pack's rows.

Two things make VERL's losses independent of how packs are cut: counts of the whole mini-batch (`batch_num_tokens`,
`global_batch_size`), and one padded width of the responses for all packs, by which `seq-mean-token-sum-norm` divides.
Called by engine.py from one thread, because VERL's loss writes into its actor config.
"""

import functools
from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss, sft_loss

from megatrain_rl.batch import PackedBatch
from megatrain_rl.objectives import ObjectiveOutput, TokenStats
from megatrain_rl.verl_plugin.engine import batch

LossFunction = Callable[..., tuple[Tensor, dict]]


def _function(loss_function: LossFunction | None) -> Callable | None:
    return loss_function.func if isinstance(loss_function, functools.partial) else loss_function


def predict_mask(data: TensorDict, loss_function: LossFunction | None) -> list[Tensor]:
    """Per row, bool: true at the positions whose log-probs are needed.

    For a loss of VERL's own these are the positions that it counts; without a loss, those that VERL's RL trainers read.
    Another loss function gets every position.
    """
    function = _function(loss_function)
    if function is ppo_loss:
        return batch.at_response_mask(data)
    if function is sft_loss:
        return batch.at_loss_mask(data)
    if function is None and batch.has_responses(data):
        return batch.at_responses(data)
    return batch.everywhere(data)


class VerlObjective:
    """`loss_function` over the mini-batch `data`. The counts that VERL's losses divide by are written into `data`."""

    def __init__(self, loss_function: LossFunction, data: TensorDict, group: torch.distributed.ProcessGroup):
        self._loss_function = loss_function
        self._group = group
        # a mini-batch without a single counted token has loss 0, not 0/0
        tu.assign_non_tensor(data, batch_num_tokens=max(1, int(data["loss_mask"].sum())), dp_size=1, sp_size=1)
        self._data = _dense_responses(data) if _function(loss_function) is ppo_loss else data

    def __call__(self, stats: TokenStats, pack: PackedBatch) -> ObjectiveOutput:
        device = stats.log_probs_T.device
        rows = tu.index_select_tensor_dict(self._data, list(pack.sequence_ids)).to(device)
        offsets = pack.cu_seqlens.to(device=device, dtype=torch.int64)
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(stats.log_probs_T, offsets=offsets)}
        if stats.entropy_T is not None:
            output["entropy"] = torch.nested.nested_tensor_from_jagged(stats.entropy_T, offsets=offsets)
        loss, metrics = self._loss_function(model_output=output, data=rows, dp_group=self._group)
        return ObjectiveOutput(loss=loss, metrics=metrics)


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
