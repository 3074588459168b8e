"""PackedBatch: sequences laid end to end without padding, and how a mini-batch is cut into packs.

Sequences of a pack that begin with the same prompt may share it: layers then compute it once (`source_T`).

Shapes: T tokens of a pack, S sequences in it. Every per-token tensor is aligned with the tokens: entry t of
`targets_T`, of log-probs and of entropies belongs to the prediction of token t+1, made at token t.
"""

import functools
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
    source_T: int64, the token of the pack that layers compute in the place of each: itself, or the same token of an
        earlier sequence that begins with the same prompt. None: every token is computed.
    """

    tokens_T: Tensor
    positions_T: Tensor
    cu_seqlens: Tensor
    targets_T: Tensor
    predict_T: Tensor
    temperature_T: Tensor
    sequence_ids: tuple[int, ...]
    source_T: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """The tokens of its sequences."""
        return self.tokens_T.numel()

    @functools.cached_property
    def num_computed(self) -> int:
        """The tokens that layers compute: all of them, or without those that are computed for another sequence."""
        return self.num_tokens if self.source_T is None else int(self.computed_T.sum())

    @functools.cached_property
    def computed_T(self) -> Tensor:
        """bool: the token is computed where it stands."""
        if self.source_T is None:
            return torch.ones_like(self.predict_T)
        return self.source_T == torch.arange(self.num_tokens)

    @property
    def max_seqlen(self) -> int:
        return int(self.cu_seqlens.diff().max())


def pack(
    sequences: Sequence[Tensor],
    sequence_ids: Sequence[int],
    *,
    predict: Sequence[Tensor] | None = None,
    temperature: float | Sequence[float] = 1.0,
    prompt_lengths: Sequence[int] | None = None,
) -> PackedBatch:
    """Lay `sequences` (int64, each (L,)) end to end as one pack.

    predict: per sequence a bool (L,), where log-probs are wanted; None wants all but the last token's. The last token
        of a sequence has no next token and is never predicted.
    temperature: one for all, or one per sequence. A temperature below 1e-8 counts as 1e-8.
    prompt_lengths: so many tokens at the beginning of each sequence are computed once for all sequences that have the
        same ones there. None: nothing is shared.
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
    if prompt_lengths is not None:
        _check_prompts(prompt_lengths, lengths)
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
        source_T=None if prompt_lengths is None else _sources(sequences, prompt_lengths),
    )


def _sources(sequences: Sequence[Tensor], prompt_lengths: Sequence[int]) -> Tensor:
    """`PackedBatch.source_T` of sequences that are laid end to end."""
    first: dict[bytes, int] = {}
    sources, start = [], 0
    for sequence, length in zip(sequences, prompt_lengths, strict=True):
        source = torch.arange(start, start + len(sequence))
        prompt = _prompt(sequence, length)
        begin = first.setdefault(_key(prompt), start)
        source[: len(prompt)] = torch.arange(begin, begin + len(prompt))
        sources.append(source)
        start += len(sequence)
    return torch.cat(sources)


def _prompt(sequence: Tensor, length: int) -> Tensor:
    """What may be shared. A sequence's last token is always its own, so that every sequence computes something."""
    return sequence[: min(length, len(sequence) - 1)]


def _key(prompt: Tensor) -> bytes:
    return prompt.long().numpy().tobytes()


def _check_prompts(prompt_lengths: Sequence[int], lengths: Sequence[int]) -> None:
    fits = len(prompt_lengths) == len(lengths)
    if not fits or any(not 0 <= p <= n for p, n in zip(prompt_lengths, lengths, strict=True)):
        raise ValueError(f"prompt_lengths={list(prompt_lengths)}: one for each sequence, of lengths {list(lengths)}")


def _check_ids(sequence: Tensor) -> None:
    integers = not (sequence.is_floating_point() or sequence.is_complex() or sequence.dtype == torch.bool)
    if sequence.dim() != 1 or not integers or sequence.device.type != "cpu":
        raise ValueError(
            f"a sequence is a tensor (L,) of integer token ids on the CPU, not {tuple(sequence.shape)} of {sequence.dtype} on "
            f"{sequence.device}"
        )


@dataclass(frozen=True)
class Group:
    """Sequences that begin with the same prompt. rows: of the mini-batch. prompt: number of tokens that they share."""

    rows: tuple[int, ...]
    prompt: int


def cut(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    max_sequences: int | None = None,
    groups: Sequence[Group] | None = None,
    repeat_cost: float = 0.0,
) -> list[list[int]]:
    """Cut sequences of these lengths into packs of at most `max_tokens`, as few and as equal as possible.

    Longest-processing-time assignment (Graham 1969) into the fewest packs that hold. A sequence longer than
    `max_tokens` gets a pack of its own; whether the GPU can hold it is the trainer's check. Returns row numbers per
    pack, ascending inside one.

    groups: every row in one of them. A group stays together, and its prompt counts once. One that is too large for a
        pack is cut into as few and as equal parts as possible, each with the prompt. None: nothing is shared.
    repeat_cost: what a token counts that is computed for another sequence (see `MemoryPlan.repeat_cost`).
    """
    if max_tokens < 1:
        raise ValueError(f"pack_tokens={max_tokens}: must be at least 1")
    long_rows = [[i] for i, n in enumerate(lengths) if n > max_tokens]
    items: list[_Item] = []
    for group in groups or [Group((i,), 0) for i in range(len(lengths))]:
        rows = [i for i in group.rows if lengths[i] <= max_tokens]
        items += _parts(rows, group.prompt, lengths, max_tokens, max_sequences, repeat_cost)
    return long_rows + [sorted(item.rows) for item in _fewest(items, max_tokens, max_sequences)]


@dataclass(frozen=True)
class _Item:
    """Rows that are not parted, and what they count together."""

    rows: tuple[int, ...]
    tokens: int


def _parts(
    rows: list[int],
    prompt: int,
    lengths: Sequence[int],
    max_tokens: int,
    max_sequences: int | None,
    repeat_cost: float,
) -> list[_Item]:
    """Rows with the same prompt, as few items as packs can hold. Each item has the prompt once, and repeats for it."""
    if not rows:
        return []
    repeat = math.ceil(repeat_cost * prompt)
    once = prompt - repeat  # what an item counts beside its answers, of which each counts a repeat
    answers = [_Item((i,), lengths[i] - prompt + repeat) for i in rows]
    parts = _fewest(answers, max_tokens - once, max_sequences)
    return [_Item(part.rows, part.tokens + once) for part in parts]


def _fewest(items: Sequence[_Item], max_tokens: int, max_sequences: int | None) -> list[_Item]:
    """`items`, none larger than the limits, joined into as few and as equal ones as the limits allow."""
    if not items:
        return []
    count = max(1, math.ceil(sum(item.tokens for item in items) / max_tokens))
    if max_sequences:
        count = max(count, math.ceil(sum(len(item.rows) for item in items) / max_sequences))
    items = sorted(items, key=lambda item: (-item.tokens, item.rows[0]))
    while True:
        joined = _balance(items, count, max_tokens, max_sequences)
        if joined is not None:
            return joined
        count += 1


def _balance(items: Sequence[_Item], count: int, max_tokens: int, max_sequences: int | None) -> list[_Item] | None:
    """Give each item, largest first, to the lightest of `count` with a place left; None when one does not fit."""
    lightest = [(0, k) for k in range(count)]
    rows: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for item in items:
        if not lightest:
            return None
        load, k = heapq.heappop(lightest)
        if load + item.tokens > max_tokens or (max_sequences and len(rows[k]) + len(item.rows) > max_sequences):
            return None
        rows[k] += item.rows
        tokens[k] += item.tokens
        if not max_sequences or len(rows[k]) < max_sequences:
            heapq.heappush(lightest, (tokens[k], k))
    return [_Item(tuple(r), t) for r, t in zip(rows, tokens, strict=True) if r]


def pack_sequences(
    sequences: Sequence[Tensor],
    *,
    max_tokens: int,
    max_sequences: int | None = None,
    predict: Sequence[Tensor] | None = None,
    temperature: float | Sequence[float] = 1.0,
    prompt_lengths: Sequence[int] | None = None,
    repeat_cost: float = 0.0,
) -> list[PackedBatch]:
    """Cut a mini-batch into packs: `cut`, then `pack`, with their arguments.

    Equal prompts are found by their tokens, in whatever order the sequences come.
    """
    lengths = [len(s) for s in sequences]
    groups = None
    if prompt_lengths is not None:
        _check_prompts(prompt_lengths, lengths)
        groups = _groups(sequences, prompt_lengths)
    return [
        pack(
            [sequences[i] for i in rows],
            rows,
            predict=None if predict is None else [predict[i] for i in rows],
            temperature=temperature if isinstance(temperature, (int, float)) else [temperature[i] for i in rows],
            prompt_lengths=None if prompt_lengths is None else [prompt_lengths[i] for i in rows],
        )
        for rows in cut(
            lengths, max_tokens=max_tokens, max_sequences=max_sequences, groups=groups, repeat_cost=repeat_cost
        )
    ]


def _groups(sequences: Sequence[Tensor], prompt_lengths: Sequence[int]) -> list[Group]:
    prompts = [_prompt(sequence, length) for sequence, length in zip(sequences, prompt_lengths, strict=True)]
    by_prompt: dict[bytes, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_prompt.setdefault(_key(prompt), []).append(i)
    return [Group(tuple(rows), len(prompts[rows[0]])) for rows in by_prompt.values()]
