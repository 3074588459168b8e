"""Random lengths sum up and vary; the surrogate is the loss it says."""

import pytest
import torch

from megatrain_rl.batch import pack_sequences
from megatrain_rl.bench.data import PolicyGradientSurrogate, random_lengths, random_sequences
from megatrain_rl.objectives import TokenStats


@pytest.mark.parametrize("tokens", [1536, 2000, 2560, 16384, 131072])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_lengths_sum_up_inside_their_bounds_and_vary(tokens, seed):
    lengths = random_lengths(tokens, 1024, seed=seed)
    assert sum(lengths) == tokens
    assert all(512 <= n <= 1536 for n in lengths)
    if len(lengths) > 1:
        assert len(set(lengths)) > 1
    assert lengths == random_lengths(tokens, 1024, seed=seed)
    if tokens == 131072:
        assert len(lengths) == 128 and max(lengths) - min(lengths) > 700
        assert lengths != random_lengths(tokens, 1024, seed=seed + 1)


def test_a_single_short_sequence():
    assert random_lengths(100, 1024, seed=0) == [100]


def test_sequences_are_tokens_of_those_lengths():
    sequences = random_sequences(500, 40, 320, seed=3)
    assert [len(s) for s in sequences] == random_lengths(500, 40, seed=3)
    together = torch.cat(sequences)
    assert together.dtype == torch.int64 and together.min() >= 0 and together.max() < 320
    assert len(together.unique()) > 200


def test_surrogate_is_normalised_by_the_mini_batch_not_the_pack():
    packs = pack_sequences(random_sequences(500, 40, 320, seed=3), max_tokens=128)
    assert len(packs) > 2
    surrogate = PolicyGradientSurrogate(packs, seed=5, std=2.0)
    coefficients = torch.cat([surrogate.coefficients(p) for p in packs])
    assert len(coefficients) == 500
    assert (coefficients * 500).std().item() == pytest.approx(2.0, rel=0.15)
    log_probs_T = torch.randn(packs[1].num_tokens, requires_grad=True)
    out = surrogate(TokenStats(log_probs_T=log_probs_T), packs[1])
    out.loss.backward()
    assert torch.equal(log_probs_T.grad, surrogate.coefficients(packs[1]))
