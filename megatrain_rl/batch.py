"""PackedBatch: sequences laid end to end without padding, and how a mini-batch is cut into packs.

Shapes: T tokens of a pack, S sequences in it. Every per-token tensor is aligned with the tokens: entry t of
`targets_T`, of log-probs and of entropies belongs to the prediction of token t+1, made at token t.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One pack, on the CPU.

    tokens_T: int64 token ids. positions_T: int64 position of each token in its own sequence.
    cu_seqlens: int32 (S+1,) cumulative sequence lengths, first 0, last T.
    targets_T: int64 next token; at a sequence's last token its own id, where nothing is ever predicted.
    predict_T: bool, where the head computes a log-prob (and entropy); elsewhere they are exactly 0.
    temperature_T: float32, logits are divided by it.
    sequence_ids: row of the mini-batch each of the S sequences came from.
    """

    tokens_T: Tensor
    positions_T: Tensor
    cu_seqlens: Tensor
    targets_T: Tensor
    predict_T: Tensor
    temperature_T: Tensor
    sequence_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.numel()

    @property
    def max_seqlen(self) -> int:
        return int(self.cu_seqlens.diff().max())


def pack(
    sequences: Sequence[Tensor],
    sequence_ids: Sequence[int],
    *,
    predict: Sequence[Tensor] | None = None,
    temperature: float | Sequence[float] = 1.0,
) -> PackedBatch:
    """Lay `sequences` (int64, each (L,)) end to end as one pack.

    predict: per sequence a bool (L,), where log-probs are wanted; None wants all but the last token's. The last token
        of a sequence has no next token and is never predicted.
    temperature: one for all, or one per sequence. A temperature below 1e-8 counts as 1e-8.
    An empty pack, an empty sequence, ids that are no integers, or arguments of unequal lengths are a ValueError.
    """
    for sequence in sequences:
        _check_ids(sequence)
    lengths = [len(s) for s in sequences]
    if not lengths or min(lengths) == 0:
        raise ValueError("a pack needs at least one sequence and no sequence may be empty")
    if len(sequence_ids) != len(lengths):
        raise ValueError(f"{len(lengths)} sequences but {len(sequence_ids)} sequence_ids")
    if predict is not None and [len(mask) for mask in predict] != lengths:
        raise ValueError("predict: each mask must be as long as its sequence (its last entry is ignored)")
    if not isinstance(temperature, (int, float)) and len(temperature) != len(lengths):
        raise ValueError(f"{len(lengths)} sequences but {len(temperature)} temperatures")
    temperatures = (
        [float(temperature)] * len(lengths)
        if isinstance(temperature, (int, float))
        else [float(t) for t in temperature]
    )
    targets, wanted = [], []
    for i, sequence in enumerate(sequences):
        targets.append(torch.cat([sequence[1:], sequence[-1:]]))
        mask = torch.ones(lengths[i], dtype=torch.bool) if predict is None else predict[i].bool().clone()
        mask[-1] = False
        wanted.append(mask)
    return PackedBatch(
        tokens_T=torch.cat(list(sequences)).long(),
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        targets_T=torch.cat(targets).long(),
        predict_T=torch.cat(wanted),
        temperature_T=torch.tensor(temperatures, dtype=torch.float32)
        .clamp(min=1e-8)
        .repeat_interleave(torch.tensor(lengths)),
        sequence_ids=tuple(sequence_ids),
    )


def _check_ids(sequence: Tensor) -> None:
    integers = not (sequence.is_floating_point() or sequence.is_complex() or sequence.dtype == torch.bool)
    if sequence.dim() != 1 or not integers or sequence.device.type != "cpu":
        raise ValueError(
            f"a sequence is a tensor (L,) of integer token ids on the CPU, not {tuple(sequence.shape)} of {sequence.dtype} on "
            f"{sequence.device}"
        )


def cut(lengths: Sequence[int], *, max_tokens: int, max_sequences: int | None = None) -> list[list[int]]:
    """Cut sequences of these lengths into packs of at most `max_tokens`, as few and as equal as possible.

    Longest-processing-time assignment (Graham 1969) into the fewest packs that hold. A sequence longer than
    `max_tokens` gets a pack of its own; whether the GPU can hold it is the trainer's check. Returns row numbers per
    pack, ascending inside one.
    """
    if max_tokens < 1:
        raise ValueError(f"pack_tokens={max_tokens}: must be at least 1")
    long_rows = [[i] for i, n in enumerate(lengths) if n > max_tokens]
    rows = sorted((i for i, n in enumerate(lengths) if n <= max_tokens), key=lambda i: (-lengths[i], i))
    if not rows:
        return long_rows
    count = max(1, math.ceil(sum(lengths[i] for i in rows) / max_tokens))
    if max_sequences:
        count = max(count, math.ceil(len(rows) / max_sequences))
    while True:
        packs = _balance(rows, lengths, count, max_tokens, max_sequences)
        if packs is not None:
            return long_rows + packs
        count += 1


def _balance(
    rows: Sequence[int], lengths: Sequence[int], count: int, max_tokens: int, max_sequences: int | None
) -> list[list[int]] | None:
    """Give each row, longest first, to the lightest pack with a place left; None when one does not fit."""
    open_packs = [(0, k) for k in range(count)]
    packs: list[list[int]] = [[] for _ in range(count)]
    for i in rows:
        if not open_packs:
            return None
        load, k = heapq.heappop(open_packs)
        if load + lengths[i] > max_tokens:
            return None
        packs[k].append(i)
        if not max_sequences or len(packs[k]) < max_sequences:
            heapq.heappush(open_packs, (load + lengths[i], k))
    return [sorted(p) for p in packs if p]


def pack_sequences(
    sequences: Sequence[Tensor],
    *,
    max_tokens: int,
    max_sequences: int | None = None,
    predict: Sequence[Tensor] | None = None,
    temperature: float | Sequence[float] = 1.0,
) -> list[PackedBatch]:
    """Cut a mini-batch into packs: `cut`, then `pack`, with their arguments."""
    return [
        pack(
            [sequences[i] for i in rows],
            rows,
            predict=None if predict is None else [predict[i] for i in rows],
            temperature=temperature if isinstance(temperature, (int, float)) else [temperature[i] for i in rows],
        )
        for rows in cut([len(s) for s in sequences], max_tokens=max_tokens, max_sequences=max_sequences)
    ]
