"""VERL's TensorDict is cut into packs, and results are put back into its row order.

A row of a mini-batch is one sequence without padding, in each of VERL's three layouts: RL with nested fields (v1), RL
with padded fields beside nested `input_ids` (v0), and SFT with a full-length nested `loss_mask`. Everything is on the
CPU. Shapes: B rows of a mini-batch, T tokens of a pack. Entry t of a sequence belongs to the prediction of token t+1.
Called by engine.py and loss.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

from megatrain_rl.batch import PackedBatch, pack_sequences
from megatrain_rl.objectives import TokenStats


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """The rows of a mini-batch, as packs are cut from them.

    sequences: token ids of each row. offsets: int64 (B+1,), those of `input_ids`.
    predict: bool, one tensor per row, true where a log-prob is wanted. temperature: one for all rows, or one per row.
    prompt_lengths: tokens of each row's prompt, 0 in SFT.
    """

    sequences: list[Tensor]
    offsets: Tensor
    predict: list[Tensor]
    temperature: float | list[float]
    prompt_lengths: list[int]

    def packs(
        self, *, max_tokens: int, max_sequences: int | None, share_prompts: bool, repeat_cost: float = 0.0
    ) -> list[PackedBatch]:
        """See `pack_sequences`. share_prompts: equal prompts are computed once."""
        return pack_sequences(
            self.sequences,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            predict=self.predict,
            temperature=self.temperature,
            prompt_lengths=self.prompt_lengths if share_prompts else None,
            repeat_cost=repeat_cost,
        )

    def in_row_order(self, values: list[Tensor], packs: list[PackedBatch]) -> Tensor:
        """Put per-token values, (T,) of each pack, into one jagged tensor with exactly the offsets of `input_ids`."""
        rows: list[Tensor] = [torch.empty(0)] * len(self.sequences)
        for value_T, pack in zip(values, packs, strict=True):
            for row, piece in zip(pack.sequence_ids, value_T.split(pack.cu_seqlens.diff().tolist()), strict=True):
                rows[row] = piece
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets=self.offsets)

    def model_output(self, stats: list[TokenStats], packs: list[PackedBatch]) -> dict[str, Tensor]:
        """VERL's `model_output` for the whole mini-batch: log_probs and, if the stats have it, entropy."""
        output = {"log_probs": self.in_row_order([s.log_probs_T for s in stats], packs)}
        entropies = [s.entropy_T for s in stats if s.entropy_T is not None]
        if entropies:
            output["entropy"] = self.in_row_order(entropies, packs)
        return output


def read(data: TensorDict, *, predict: list[Tensor]) -> MiniBatch:
    """Read the rows of `data`. predict: where log-probs are wanted, by one of the functions below."""
    temperature = data["temperature"]
    if isinstance(temperature, Tensor):
        temperature = temperature.flatten().tolist()
    input_ids = nested_input_ids(data)
    return MiniBatch(
        sequences=[row.cpu() for row in input_ids.unbind()],
        offsets=jagged_offsets(input_ids).cpu().long(),
        predict=predict,
        temperature=temperature,
        prompt_lengths=_prompt_lengths(data),
    )


def _prompt_lengths(data: TensorDict) -> list[int]:
    rows = lengths(data)
    if not has_responses(data):
        return [0] * len(rows)
    return [n - r for n, r in zip(rows, response_lengths(data), strict=True)]


def jagged_offsets(nested: Tensor) -> Tensor:
    """The index at which each row of a jagged tensor begins, and the one at which the last row ends: (B+1,)."""
    return nested.offsets()  # type: ignore[attr-defined]  # jagged tensors have it, torch's stub of Tensor does not


def jagged_lengths(nested: Tensor) -> list[int]:
    """The length of each row of a jagged tensor."""
    return jagged_offsets(nested).diff().tolist()


def nested_input_ids(data: TensorDict) -> Tensor:
    """The jagged `input_ids` of the batch. Padded ones, and position ids of vision models, are a ValueError."""
    input_ids = data["input_ids"]
    if not input_ids.is_nested:
        raise ValueError("input_ids are padded: set data.pad_mode=no_padding")
    if "position_ids" in data and data["position_ids"].dim() > 2:
        raise ValueError("position_ids have several axes (a vision model): strategy megatrain supports text models")
    return input_ids


def lengths(data: TensorDict) -> list[int]:
    """The number of tokens of each row."""
    return jagged_lengths(nested_input_ids(data))


def has_responses(data: TensorDict) -> bool:
    """Whether `data` is an RL batch: it has prompts and responses, and its other fields cover the responses only."""
    return "prompts" in data and "responses" in data


def response_lengths(data: TensorDict) -> list[int]:
    """The number of tokens of each row's response. In the v0 layout the padding of `responses` is not counted."""
    responses = data["responses"]
    if responses.is_nested:
        return jagged_lengths(responses)
    return data["attention_mask"][:, -responses.shape[1] :].sum(dim=1).tolist()


def of_responses(values: Tensor, data: TensorDict) -> Tensor:
    """Per-token `values` of whole rows, jagged, at the positions that predict the responses, in the responses' layout.

    That is VERL's layout of `old_log_probs` in `data`: jagged where the response mask is, else padded.
    """
    mask = data["response_mask"]
    return response_from_nested(values, mask) if mask.is_nested else no_padding_2_padding(values, data)


def everywhere(data: TensorDict) -> list[Tensor]:
    """True at every position that has a next token."""
    return [torch.arange(n) < n - 1 for n in lengths(data)]


def at_responses(data: TensorDict) -> list[Tensor]:
    """True at the positions that predict a response token. VERL's RL trainers and losses read no others."""
    rows = zip(lengths(data), response_lengths(data), strict=True)
    return [_last(n, torch.ones(r, dtype=torch.bool)) for n, r in rows]


def at_response_mask(data: TensorDict) -> list[Tensor]:
    """True at the positions that predict a response token with mask 1. VERL's policy losses count no others."""
    rows = zip(lengths(data), response_lengths(data), data["response_mask"].unbind(), strict=True)
    return [_last(n, mask[:r].cpu().bool()) for n, r, mask in rows]


def at_loss_mask(data: TensorDict) -> list[Tensor]:
    """True at the positions that predict a token with `loss_mask` 1, for a mask as long as the sequence (SFT)."""
    masks = data["loss_mask"].unbind()
    return [torch.cat([mask[1:].cpu().bool(), torch.zeros(1, dtype=torch.bool)]) for mask in masks]


def _last(length: int, response: Tensor) -> Tensor:
    """bool (length,): `response` at the positions that predict the last len(response) tokens, false elsewhere."""
    if len(response) >= length:
        raise ValueError(
            f"a row has a response of {len(response)} tokens and no prompt: the first token of a response is predicted from the "
            "prompt's last one; prompts must not be empty (data.prompt_key)"
        )
    predict = torch.zeros(length, dtype=torch.bool)
    predict[length - len(response) - 1 : length - 1] = response
    return predict


def select_rows(data: TensorDict, rows: Sequence[int]) -> TensorDict:
    """The rows of `data` with these numbers, as VERL's `index_select_tensor_dict` gives them.

    VERL's takes every row of a jagged field apart, also those that are not wanted: 20 ms a pack, where a mini-batch has
    512 rows.
    """
    jagged = {key: value for key, value in data.items() if _is_plain_jagged(value)}
    selected = tu.index_select_tensor_dict(data.exclude(*jagged), list(rows))
    for key, value in jagged.items():
        selected[key] = _jagged_rows(value, torch.tensor(rows))
    return selected


def _is_plain_jagged(value: Any) -> bool:
    """Rows lie one after the other, and each is one axis long."""
    nested = isinstance(value, Tensor) and value.is_nested and value.layout == torch.jagged
    return nested and value.dim() == 2 and value.lengths() is None


def _jagged_rows(value: Tensor, rows: Tensor) -> Tensor:
    offsets = jagged_offsets(value)
    rows = rows.to(offsets.device)
    begins, lengths = offsets[rows], offsets.diff()[rows]
    selected = torch.cat([offsets.new_zeros(1), lengths.cumsum(0)])
    places = torch.arange(int(selected[-1]), device=offsets.device)
    places = places + (begins - selected[:-1]).repeat_interleave(lengths)
    return torch.nested.nested_tensor_from_jagged(value.values()[places], offsets=selected)


def flag(data: TensorDict, key: str) -> bool:
    """A switch of the batch that is no tensor. VERL leaves it out when it is off."""
    return bool(tu.get_non_tensor_data(data=data, key=key, default=False))
