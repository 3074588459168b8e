"""A weight update is taken entirely or not at all."""

import pytest
import torch

from megatrain_rl.rollout.weights import WeightUpdate

from .conftest import build_model


def named(model):
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def update(model, pairs):
    update = WeightUpdate(model)
    for pair in pairs:
        update.add([pair])
    update.commit()


def assert_same(model, other):
    for (name, mine), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_every_weight_arrives():
    model, source = build_model(0), build_model(1)
    update(model, named(source))
    assert_same(model, source)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda pairs: [*pairs, ("model.layers.0.experts.up_proj", torch.zeros(1))], r"no parameter model\.layers\.0"),
        (lambda pairs: [("module." + name, tensor) for name, tensor in pairs], r"no parameter module\."),
        (lambda pairs: pairs[:-1], "did not arrive"),
        (lambda pairs: [*pairs[:-1], (pairs[-1][0], pairs[-1][1][:-1])], "has shape"),
        (lambda pairs: pairs + pairs[:1], "sent twice"),
    ],
)  # fmt: skip
def test_a_wrong_update_is_an_error_and_changes_nothing(spoil, message):
    model = build_model(0)
    with pytest.raises(ValueError, match=message):
        update(model, spoil(named(build_model(1))))
    assert_same(model, build_model(0))


def test_tied_head_may_be_sent_or_not_but_not_with_other_values():
    source = build_model(1, tied=True)
    embedding = source.model.embed_tokens.weight.detach()
    for extra in ([], [("lm_head.weight", embedding.clone())]):
        model = build_model(0, tied=True)
        update(model, named(source) + extra)
        assert_same(model, source)
    with pytest.raises(ValueError, match="tied"):
        update(build_model(0, tied=True), [*named(source), ("lm_head.weight", embedding + 1)])


def test_only_the_head_under_its_own_name_is_enough_for_a_tied_model():
    source, model = build_model(1, tied=True), build_model(0, tied=True)
    pairs = [("lm_head.weight" if "embed_tokens" in name else name, tensor) for name, tensor in named(source)]
    update(model, pairs)
    assert_same(model, source)


def test_an_untied_head_must_be_sent():
    with pytest.raises(ValueError, match=r"lm_head\.weight did not arrive"):
        update(build_model(0), [pair for pair in named(build_model(1)) if pair[0] != "lm_head.weight"])
