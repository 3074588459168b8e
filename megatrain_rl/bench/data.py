"""Random data of a benchmark: lengths, tokens, advantages. The same seed gives the same data to every engine.

Shapes: T tokens of a pack.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain_rl.batch import PackedBatch, pack_sequences
from megatrain_rl.objectives import ObjectiveOutput, TokenStats

ADVANTAGE_STD = 0.02


def random_lengths(tokens: int, mean_length: int, *, seed: int) -> list[int]:
    """Lengths of 0.5 to 1.5 times the mean, `tokens` in all; not equal, as in practice. A single one may be shorter.
    ValueError for fewer than 1 token or a mean below 2."""
    if tokens < 1 or mean_length < 2:
        raise ValueError(f"{tokens} tokens in sequences of --mean-length {mean_length}: need at least 1 and 2")
    count = max(1, round(tokens / mean_length))
    low, high = (mean_length + 1) // 2, mean_length * 3 // 2
    if count == 1:
        return [tokens]
    draw = torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()
    lengths = [low + int(u * (high - low + 1)) for u in draw]
    # Move every length towards the bound that brings the sum closer, in proportion to its room.
    missing = tokens - sum(lengths)
    room = [high - n if missing > 0 else n - low for n in lengths]
    total = max(1, sum(room))
    lengths = [n + int(missing * r / total) for n, r in zip(lengths, room, strict=True)]
    left = tokens - sum(lengths)  # what rounding left over: less than one token a sequence
    step = 1 if left > 0 else -1
    for i in sorted(range(count), key=lambda i: -room[i])[: abs(left)]:
        lengths[i] += step
    return lengths


def random_sequences(tokens: int, mean_length: int, vocab_size: int, *, seed: int) -> list[Tensor]:
    """Random token ids, int64, in sequences of `random_lengths`."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, vocab_size, (n,), generator=generator) for n in random_lengths(tokens, mean_length, seed=seed)
    ]


def packed_batches(
    tokens: int, mean_length: int, vocab_size: int, *, max_tokens: int, seed: int, count: int
) -> list[list[PackedBatch]]:
    """Data of `count` steps, step i from seed + i, cut into packs before any clock runs."""
    return [
        pack_sequences(random_sequences(tokens, mean_length, vocab_size, seed=seed + i), max_tokens=max_tokens)
        for i in range(count)
    ]


class PolicyGradientSurrogate:
    """The loss -sum(advantage_T * log_prob_T) / tokens of the mini-batch, with normal advantages of standard deviation
    `std`.

    Its gradient is that of the first inner step of GRPO. On random weights a token's gradient is tens of times that of
    a trained model (norm 10 of a 7 B model on 16k tokens at std 1); the default brings the norm to where RL runs have
    it, a few tenths, below the clipping limit.
    """

    def __init__(self, packs: Sequence[PackedBatch], *, seed: int, std: float = ADVANTAGE_STD):
        generator = torch.Generator().manual_seed(seed)
        self._num_tokens = sum(p.num_tokens for p in packs)
        self._advantages = {p.sequence_ids: torch.randn(p.num_tokens, generator=generator) * std for p in packs}

    def coefficients(self, pack: PackedBatch) -> Tensor:
        """fp32 (T,) on the CPU: the derivative of the loss with respect to each log-prob of `pack`."""
        return self._advantages[pack.sequence_ids] / -self._num_tokens

    def __call__(self, stats: TokenStats, pack: PackedBatch) -> ObjectiveOutput:
        coefficient_T = self.coefficients(pack).to(stats.log_probs_T.device)
        return ObjectiveOutput(loss=(coefficient_T * stats.log_probs_T).sum())
