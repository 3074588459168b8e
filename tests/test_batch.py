"""Packing: nothing lost, nothing over the limit, few and equal packs."""

import random

import pytest
import torch

from megatrain_rl.batch import cut, pack, pack_sequences


def test_pack_lays_sequences_end_to_end():
    made = pack([torch.tensor([7, 8, 9]), torch.tensor([5])], [4, 2], temperature=[0.5, 0.0])
    assert made.tokens_T.tolist() == [7, 8, 9, 5]
    assert made.positions_T.tolist() == [0, 1, 2, 0]
    assert made.cu_seqlens.tolist() == [0, 3, 4] and made.cu_seqlens.dtype == torch.int32
    assert made.targets_T.tolist() == [8, 9, 9, 5]
    assert made.predict_T.tolist() == [True, True, False, False]
    assert made.temperature_T.tolist() == pytest.approx([0.5, 0.5, 0.5, 1e-8])
    assert (made.sequence_ids, made.num_tokens, made.max_seqlen) == ((4, 2), 4, 3)


def test_the_last_token_is_never_predicted_and_the_mask_is_not_changed():
    mask = torch.ones(3, dtype=torch.bool)
    made = pack([torch.tensor([1, 2, 3])], [0], predict=[mask])
    assert made.predict_T.tolist() == [True, True, False] and mask.all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_sequences", [None, 3])
def test_cut_loses_nothing_and_keeps_the_limits(seed, max_sequences):
    lengths = [random.Random(seed).randint(1, 120) for _ in range(60)]
    packs = cut(lengths, max_tokens=100, max_sequences=max_sequences)
    assert sorted(i for p in packs for i in p) == list(range(60))
    for rows in packs:
        total = sum(lengths[i] for i in rows)
        assert total <= 100 or len(rows) == 1
        assert max_sequences is None or len(rows) <= max_sequences
    if max_sequences is None:
        assert len(packs) <= 1.25 * sum(lengths) / 100 + sum(n > 100 for n in lengths)


def test_packs_are_balanced():
    packs = cut([50] * 10, max_tokens=200)
    assert sorted(len(p) for p in packs) == [3, 3, 4]


def test_temperature_and_mask_follow_their_sequence():
    data = [torch.full((n,), i) for i, n in enumerate((3, 9, 4, 8))]
    predict = [torch.arange(len(s)) >= i for i, s in enumerate(data)]
    for made in pack_sequences(data, max_tokens=12, predict=predict, temperature=[1.0, 2.0, 3.0, 4.0]):
        bounds = made.cu_seqlens.tolist()
        for row, start, end in zip(made.sequence_ids, bounds[:-1], bounds[1:], strict=True):
            assert (made.tokens_T[start:end] == row).all()
            assert (made.temperature_T[start:end] == row + 1).all()
            assert made.predict_T[start:end].tolist() == [*predict[row][:-1].tolist(), False]


def test_bad_input_is_an_error():
    with pytest.raises(ValueError, match="pack_tokens=0"):
        cut([1], max_tokens=0)
    two = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    with pytest.raises(ValueError, match=r"^predict: "):
        pack(two, [0, 1], predict=[torch.ones(2), torch.ones(1)])
    with pytest.raises(ValueError, match="2 sequences but 1 sequence_ids"):
        pack(two, [0])
    with pytest.raises(ValueError, match="2 sequences but 3 temperatures"):
        pack(two, [0, 1], temperature=[1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="no sequence may be empty"):
        pack([torch.tensor([], dtype=torch.long)], [0])


@pytest.mark.parametrize(
    "sequence",
    [torch.ones(3), torch.ones(3, dtype=torch.bool), torch.ones(1, 3, dtype=torch.long), torch.tensor(3), torch.ones(3, device="meta").long()],
    ids=["float", "bool", "two axes", "no axis", "another device"],
)  # fmt: skip
def test_token_ids_are_integers_on_the_cpu(sequence):
    with pytest.raises(ValueError, match="integer token ids on the CPU"):
        pack([sequence], [0])
    assert pack([torch.ones(3, dtype=torch.int32)], [0]).tokens_T.dtype == torch.int64
