"""Batched generation against one HF `generate` per prompt, and against a full forward pass."""

import random

import pytest
import torch

from megatrain_rl.rollout.generation import BatchGenerator, Request
from megatrain_rl.rollout.sampling import SamplingParams

from .conftest import EOS, build_model

LENGTH = 12


def make(prompt, seed=0, **settings):
    params = SamplingParams(**{"max_tokens": LENGTH, "logprobs": True, **settings})
    return Request(prompt_ids=list(prompt), params=params, random=random.Random(seed))


def generator_of(model, eos=(), max_batch=64, max_prefill_tokens=4096):
    return BatchGenerator(model, eos_token_ids=eos, max_batch=max_batch, max_prefill_tokens=max_prefill_tokens)


def run(generator, requests, steps=500):
    for request in requests:
        generator.add(request)
    finished = []
    for _ in range(steps):
        finished += generator.step()
        if len(finished) == len(requests):
            return finished
    raise AssertionError("requests did not finish")


@pytest.fixture(scope="module")
def greedy_answers(model, prompts):
    """HF's own greedy answers, one prompt at a time, no padding."""
    answers = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def test_left_padded_batch_equals_single_hf_generate(model, prompts, greedy_answers):
    requests = [make(p, temperature=0.0) for p in prompts]
    run(generator_of(model), requests)
    assert [r.token_ids for r in requests] == greedy_answers


@pytest.mark.parametrize(
    "limits", [{"max_batch": 2}, {"max_prefill_tokens": 10}, {"max_batch": 3, "max_prefill_tokens": 1}]
)
def test_joining_and_leaving_the_batch_changes_no_answer(model, prompts, greedy_answers, limits):
    requests = [make(p, temperature=0.0, max_tokens=3 + i) for i, p in enumerate(prompts)]
    run(generator_of(model, **limits), requests)
    assert [r.token_ids for r in requests] == [a[: 3 + i] for i, a in enumerate(greedy_answers)]


def test_a_request_that_arrives_later_joins_the_running_batch(model, prompts, greedy_answers):
    generator = generator_of(model)
    first, second = make(prompts[0], temperature=0.0), make(prompts[3], temperature=0.0, max_tokens=2)
    generator.add(first)
    for _ in range(4):
        assert generator.step() == []
    generator.add(second)
    generator.step()
    assert generator.step() == [second]  # the short one does not wait for the long one
    while not generator.step():
        pass
    assert (first.token_ids, second.token_ids) == (greedy_answers[0], greedy_answers[3][:2])


def test_log_probs_equal_a_full_forward_at_the_temperature(model, prompts):
    requests = [make(p, seed=i, temperature=0.7) for i, p in enumerate(prompts)]
    run(generator_of(model, max_batch=4), requests)
    for request in requests:
        with torch.no_grad():
            logits = model(torch.tensor([request.all_ids])).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits / 0.7, -1).gather(-1, torch.tensor(request.token_ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(request.log_probs), expected, atol=1e-5, rtol=1e-5)


def test_a_seeded_answer_does_not_depend_on_its_neighbours(model, prompts):
    alone = make(prompts[1], seed=7)
    run(generator_of(model), [alone])
    together = [make(p, seed=7 if i == 1 else i) for i, p in enumerate(prompts)]
    run(generator_of(model), together)
    assert together[1].token_ids == alone.token_ids
    other = make(prompts[1], seed=8)
    run(generator_of(model), [other])
    assert other.token_ids != alone.token_ids


def test_any_eos_ends_the_answer_and_is_its_last_token(model, prompts, greedy_answers):
    stop = {greedy_answers[0][3], greedy_answers[1][5]}
    requests = [make(p, temperature=0.0) for p in prompts]
    run(generator_of(model, eos=stop), requests)
    for request, answer in zip(requests, greedy_answers, strict=True):
        ends = [i for i, token in enumerate(answer) if token in stop]
        assert request.token_ids == (answer[: ends[0] + 1] if ends else answer)
    assert len(requests[0].token_ids) <= 4


def test_ignore_eos_and_stop_token_ids(model, prompts, greedy_answers):
    eos, stop = greedy_answers[0][0], greedy_answers[0][4]
    assert stop not in greedy_answers[0][:4] and eos != stop
    request = make(prompts[0], temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    run(generator_of(model, eos={eos}), [request])
    assert request.token_ids == greedy_answers[0][:5]


def test_top_k_of_one_equals_greedy(model, prompts, greedy_answers):
    requests = [make(p, seed=i, top_k=1) for i, p in enumerate(prompts)]
    run(generator_of(model), requests)
    assert [r.token_ids for r in requests] == greedy_answers


def test_recomputed_cache_goes_on_with_the_same_answer(model, prompts, greedy_answers):
    generator = generator_of(model)
    requests = [make(p, temperature=0.0) for p in prompts]
    for request in requests:
        generator.add(request)
    generator.step()
    generator.step()
    generator.drop_cache()
    while not all(len(r.token_ids) == LENGTH for r in requests):
        generator.step()
    assert [r.token_ids for r in requests] == greedy_answers


def test_discard_and_abort(model, prompts, greedy_answers):
    generator = generator_of(model, max_batch=2)
    requests = [make(p, temperature=0.0) for p in prompts[:4]]
    for request in requests:
        generator.add(request)
    generator.step()
    generator.discard(requests[0])  # running
    generator.discard(requests[3])  # waiting
    generator.step()
    aborted = generator.abort_all()
    assert aborted == [requests[1], requests[2]]
    assert [len(r.token_ids) for r in aborted] == [2, 1]
    assert aborted[0].token_ids == greedy_answers[1][:2]
    assert generator.step() == []


def test_linear_attention_layers_are_refused(model):
    other = build_model()
    other.config.layer_types = ["linear_attention", "full_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"linear_attention.*rollout\.name=vllm"):
        generator_of(other, eos={EOS})
