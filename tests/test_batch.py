"""Packing: nothing lost, nothing over the limit, few and equal packs."""

import math
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


# ---- shared prompts ----


def grouped(prompts, answers):
    """Row i begins with `prompts[i]` threes, fours, ... and goes on with its own tokens."""
    return [torch.cat([torch.full((p,), 3 + p), 1000 + i * 100 + torch.arange(a)]) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))]  # fmt: skip


def test_a_prompt_is_computed_where_it_comes_first():
    data = grouped([3, 2, 3], [2, 1, 2])
    made = pack(data, [0, 1, 2], prompt_lengths=[3, 2, 3])
    assert made.source_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 11, 12]
    assert (made.num_tokens, made.num_computed) == (13, 10)
    assert torch.equal(made.tokens_T[made.source_T], made.tokens_T)
    assert pack(data, [0, 1, 2]).source_T is None


def test_the_last_token_is_a_sequences_own():
    """A row that is all prompt still computes something."""
    data = [torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7, 8])]
    made = pack(data, [0, 1, 2], prompt_lengths=[3, 3, 3])
    assert made.source_T.tolist() == [0, 1, 2, 0, 1, 5, 6, 7, 8, 9]


def test_prompts_are_found_by_their_tokens():
    """Beginnings that are equal but not as long a prompt are not shared; no length is without a prompt."""
    data = [torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 9, 8]), torch.tensor([5, 6, 7, 1])]
    made = pack(data, [0, 1, 2], prompt_lengths=[2, 2, 3])
    assert made.source_T.tolist() == [0, 1, 2, 3, 0, 1, 6, 7, 8, 9, 10, 11]
    assert pack(data, [0, 1, 2], prompt_lengths=[0, 0, 0]).num_computed == 12


@pytest.mark.parametrize("lengths", [[1], [1, 9], [-1, 0]])
def test_prompts_that_do_not_fit_are_refused(lengths):
    data = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    for function in (
        lambda **more: pack(data, [0, 1], **more),
        lambda **more: pack_sequences(data, max_tokens=9, **more),
    ):
        with pytest.raises(ValueError, match="prompt_lengths"):
            function(prompt_lengths=lengths)


@pytest.mark.parametrize("max_sequences", [None, 1, 3, 5])
@pytest.mark.parametrize("max_tokens", [20, 33, 64, 300])
@pytest.mark.parametrize("repeat_cost", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_packs_with_prompts_hold(seed, repeat_cost, max_tokens, max_sequences):
    """Every row once, within the limits, whatever the prompts; a row too long for a pack alone."""
    g = torch.Generator().manual_seed(seed)
    prompts = (torch.randint(0, 12, (5,), generator=g)[torch.randint(0, 5, (30,), generator=g)]).tolist()
    answers = torch.randint(1, 16, (30,), generator=g).tolist()
    data = grouped(prompts, answers)
    made = pack_sequences(
        data, max_tokens=max_tokens, max_sequences=max_sequences, prompt_lengths=prompts, repeat_cost=repeat_cost
    )
    assert sorted(row for p in made for row in p.sequence_ids) == list(range(30))
    for p in made:
        assert list(p.sequence_ids) == sorted(p.sequence_ids)
        counted = p.num_computed + math.ceil(repeat_cost * (p.num_tokens - p.num_computed))
        assert counted <= max_tokens or len(p.sequence_ids) == 1
        assert max_sequences is None or len(p.sequence_ids) <= max_sequences
    if max_sequences is None:
        assert sum(p.num_computed for p in made) <= sum(
            p.num_tokens for p in pack_sequences(data, max_tokens=max_tokens)
        )


def test_groups_stay_together():
    """VERL's order: prompt by prompt or answer by answer. Each group in one pack, and its prompt once."""
    prompts = [10, 11, 12, 13] * 4
    data = grouped(prompts, [5] * 16)
    made = pack_sequences(data, max_tokens=33, prompt_lengths=prompts)
    assert sorted(p.sequence_ids for p in made) == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert sum(p.num_computed for p in made) == 10 + 11 + 12 + 13 + 16 * 5


def test_a_group_too_large_for_a_pack_is_cut_evenly():
    prompts = [10] * 8
    made = pack_sequences(grouped(prompts, [10] * 8), max_tokens=60, prompt_lengths=prompts)
    assert [len(p.sequence_ids) for p in made] == [4, 4]
    assert [p.num_computed for p in made] == [50, 50]
