"""The choice of a token, and the log-prob that is reported with it."""

import pytest
import torch

from megatrain_rl.rollout.sampling import SamplingParams, choose_tokens

DRAWS = 20_000


def draw(logits_V, uniforms, history=(), **settings):
    params = SamplingParams(max_tokens=1, **settings)
    n = len(uniforms)
    return choose_tokens(logits_V.expand(n, -1), [params] * n, uniforms, [list(history)] * n)


def frequencies(logits_V, **settings):
    uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    tokens, _ = draw(logits_V, uniforms, **settings)
    return torch.bincount(tokens, minlength=len(logits_V)) / DRAWS


LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.4, 0.0, 2.2, -3.0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_tempered_softmax(temperature):
    expected = torch.softmax(LOGITS / temperature, -1)
    deviation = (expected * (1 - expected) / DRAWS).sqrt()
    assert ((frequencies(LOGITS, temperature=temperature) - expected).abs() < 5 * deviation + 1e-4).all()


def test_top_k_draws_only_the_k_best_in_proportion():
    kept = LOGITS.topk(3).indices
    expected = torch.zeros(7).scatter(0, kept, torch.softmax(LOGITS[kept], -1))
    assert (frequencies(LOGITS, top_k=3) - expected).abs().max() < 0.02
    assert frequencies(LOGITS, top_k=3)[expected == 0].sum() == 0


def test_top_k_of_one_is_greedy():
    uniforms = [0.0, 0.3, 0.999999]
    assert (
        draw(LOGITS, uniforms, top_k=1)[0].tolist() == draw(LOGITS, uniforms, temperature=0.0)[0].tolist() == [5, 5, 5]
    )


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.8, 0.95])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p):
    probs = torch.softmax(LOGITS, -1).sort(descending=True)
    count = int((probs.values.cumsum(-1) < top_p).sum()) + 1
    kept = probs.indices[:count]
    expected = torch.zeros(7).scatter(0, kept, probs.values[:count] / probs.values[:count].sum())
    measured = frequencies(LOGITS, top_p=top_p)
    assert (measured - expected).abs().max() < 0.02
    assert set(measured.nonzero().flatten().tolist()) == set(kept.tolist())


def test_top_p_is_taken_of_what_top_k_left():
    # The better of the two best has 0.55 of their mass: alone it reaches 0.5, but not 0.5 of the whole vocabulary's.
    assert set(frequencies(LOGITS, top_k=2, top_p=0.5).nonzero().flatten().tolist()) == {5}
    assert set(frequencies(LOGITS, top_p=0.5).nonzero().flatten().tolist()) == {5, 1}


def test_rows_of_one_batch_keep_their_own_settings():
    params = [
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=1, top_k=1),
        SamplingParams(max_tokens=1),
    ]
    tokens, _ = choose_tokens(LOGITS.expand(3, -1), params, [0.999] * 3, [[]] * 3)
    assert tokens.tolist() == [5, 5, 5 if torch.softmax(LOGITS, -1)[:6].sum() > 0.999 else 6]


def test_extreme_uniforms_never_draw_an_impossible_token():
    logits = torch.tensor([float("-1e30"), 1.0, 2.0, float("-1e30")])
    tokens, _ = draw(logits, [0.0, 1 - 2**-53])
    assert tokens.tolist() == [1, 2]


def test_reported_log_prob_is_the_trainers_whatever_truncates():
    expected = torch.log_softmax(LOGITS / 0.7, -1)
    for settings in ({}, {"top_k": 3}, {"top_p": 0.6}, {"repetition_penalty": 1.5}):
        tokens, log_probs = draw(LOGITS, [0.1, 0.5, 0.9], history=[1, 3], temperature=0.7, **settings)
        torch.testing.assert_close(log_probs, expected[tokens])
    tokens, log_probs = draw(LOGITS, [0.5], temperature=0.0)
    torch.testing.assert_close(log_probs, torch.log_softmax(LOGITS, -1)[tokens])


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    assert draw(LOGITS, [0.5], history=[5], temperature=0.0, repetition_penalty=1.2)[0].item() == 1
    logits = torch.tensor([-1.0, -1.5, -1.7])
    assert draw(logits, [0.5], history=[0], temperature=0.0, repetition_penalty=1.4)[0].item() == 0
    assert draw(logits, [0.5], history=[0], temperature=0.0, repetition_penalty=1.6)[0].item() == 1


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(FloatingPointError, match="diverged"):
        draw(torch.tensor([0.0, float("nan")]), [0.5])


@pytest.mark.parametrize(
    "given, message",
    [
        ({"min_p": 0.1}, "min_p"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
def test_bad_settings_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_request(given, default_max_tokens=8, room=8)


def test_limit_is_the_requests_then_the_default_and_never_more_than_the_room():
    def limit(given, room=100):
        return SamplingParams.from_request(given, default_max_tokens=16, room=room).max_tokens

    assert limit({}) == 16
    assert limit({"max_tokens": 20}) == limit({"max_new_tokens": 20}) == 20
    assert limit({"max_tokens": 3, "max_new_tokens": 20}) == 3
    assert limit({"max_tokens": 20}, room=7) == limit({}, room=7) == 7
