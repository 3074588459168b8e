"""Prompts that several sequences begin with are computed once: the same numbers, fewer tokens through the layers."""

import oracle
import pytest
import tiny
import torch
from test_trainer import oracle_loss, relative

from megatrain_rl.batch import pack_sequences
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.model.attention import _Copies
from megatrain_rl.model.decoder import decoder_spec
from megatrain_rl.planner import check_packs, make_plan

# Groups of four, three and one answer, in an order that no trainer sends: prompts of 13, 1 and 20 tokens.
PROMPTS = {"a": 13, "b": 1, "c": 20}
ROWS = [("a", 6), ("b", 9), ("a", 1), ("c", 7), ("a", 12), ("b", 2), ("b", 5), ("a", 3)]


def grouped(rows=ROWS, *, seed: int = 3) -> tuple[list[torch.Tensor], list[int]]:
    """Sequences, and the lengths of their prompts."""
    g = torch.Generator().manual_seed(seed)
    prompts = {name: torch.randint(0, tiny.VOCAB, (n,), generator=g) for name, n in PROMPTS.items()}
    data = [torch.cat([prompts[name], torch.randint(0, tiny.VOCAB, (n,), generator=g)]) for name, n in rows]
    return data, [PROMPTS[name] for name, _ in rows]


def packs(data, lengths, *, max_tokens=200, **more):
    return pack_sequences(data, max_tokens=max_tokens, prompt_lengths=lengths, **more)


def sharing(directory, **settings):
    return tiny.trainer(directory, **{"share_prompts": True, "pack_tokens": 200, **settings})


def step(trainer, made, weights):
    objective = tiny.WeightedLoss(weights, entropy=0.3)
    out = trainer.forward_backward(made, objective, entropy=True)
    gradients = {n: g.float().clone() for n, g in trainer.named_gradients()}
    trainer.zero_grad()
    return out, gradients


@pytest.mark.parametrize("max_tokens", [200, 48])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_statistics_and_gradients_equal_the_oracle(tmp_path, family, tied, max_tokens, device):
    """In fp32, at a temperature that is not 1, with entropies. With 48 tokens groups are cut apart."""
    model = tiny.model(tiny.config(family, tied=tied), device=device)
    data, lengths = grouped()
    weights = tiny.token_weights(data)
    trainer = sharing(tiny.saved(model, tmp_path), device=device, pack_tokens=max_tokens)
    made = packs(data, lengths, max_tokens=max_tokens, temperature=0.7)
    assert sum(p.num_computed for p in made) < sum(p.num_tokens for p in made) == sum(len(s) for s in data)
    out, gradients = step(trainer, made, weights)
    loss = oracle_loss(model, data, weights, 0.7, 0.3)
    loss.backward()
    assert sum(out.losses) == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    for name, parameter in model.named_parameters():
        difference = (gradients[name].cpu() - parameter.grad.cpu()).norm()
        assert difference <= 1e-5 * parameter.grad.norm() + 1e-6 * total, name
    truth = oracle.token_stats(model, data, [0.7] * len(data))
    for stats in (out.stats, trainer.log_probs(made, entropy=True)):
        for pack, each in zip(made, stats, strict=True):
            bounds = pack.cu_seqlens.tolist()
            for s, row in enumerate(pack.sequence_ids):
                part = slice(bounds[s], bounds[s + 1] - 1)
                assert torch.allclose(each.log_probs_T[part], truth.log_probs[row].detach().cpu(), atol=2e-5)
                assert torch.allclose(each.entropy_T[part], truth.entropies[row].detach().cpu(), atol=2e-5)
    trainer.close()


def test_sliding_windows(tmp_path, device):
    """A window is counted back from each query, in the prompt's copy too."""
    model = tiny.model(
        tiny.config(layers=4, use_sliding_window=True, sliding_window=6, max_window_layers=2), device=device
    )
    data, lengths = grouped()
    weights = tiny.token_weights(data)
    trainer = sharing(tiny.saved(model, tmp_path), device=device)
    out, gradients = step(trainer, packs(data, lengths), weights)
    loss = oracle_loss(model, data, weights, 1.0, 0.3)
    loss.backward()
    assert sum(out.losses) == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    for name, parameter in model.named_parameters():
        assert relative(gradients[name], parameter.grad) < 2e-5, name
    trainer.close()


@pytest.mark.parametrize("checkpoint_interval", [1, 3])
@pytest.mark.parametrize("multiple", [1, 32])
def test_padding_and_recompute(tmp_path, device, multiple, checkpoint_interval):
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path)
    data, lengths = grouped()
    seen = []
    for prompts, padded in ((None, 1), (lengths, multiple)):
        trainer = sharing(directory, device=device, checkpoint_interval=checkpoint_interval)
        trainer._executor._pack_multiple = padded
        seen.append(step(trainer, packs(data, prompts), tiny.token_weights(data)))
        trainer.close()
    (plain, gradients), (shared, others) = seen
    assert shared.losses == pytest.approx(plain.losses, rel=1e-5)
    total = torch.cat([g.flatten() for g in gradients.values()]).norm()
    for name, gradient in others.items():
        assert (gradient - gradients[name]).norm() <= 1e-5 * gradient.norm() + 1e-6 * total, name


def test_in_bf16_gradients_are_as_close_to_fp32_as_without(tmp_path, device):
    model = tiny.model(tiny.config(), dtype=torch.bfloat16, device=device)
    directory = tiny.saved(model, tmp_path)
    data, lengths = grouped([("a", n) for n in (6, 9, 12, 20, 3, 7, 30, 15)])
    weights = tiny.token_weights(data)
    model = model.float()
    oracle_loss(model, data, weights, 1.0, 0.3).backward()
    exact = torch.cat([p.grad.cpu().flatten() for p in model.parameters()])
    errors = []
    for prompts in (None, lengths):
        trainer = sharing(directory, device=device, pack_tokens=400, param_dtype="bfloat16")
        _, gradients = step(trainer, packs(data, prompts, max_tokens=400), weights)
        flat = torch.cat([gradients[n].cpu().flatten() for n, _ in model.named_parameters()])
        errors.append(float((flat - exact).norm()))
        trainer.close()
    assert errors[1] <= 1.1 * errors[0]


def test_layers_see_each_prompt_once(tmp_path, device, monkeypatch):
    """And the head predicts from its last token once for every answer."""
    trainer = sharing(tiny.saved(tiny.model(tiny.config()), tmp_path), device=device)
    data, lengths = grouped()
    seen = []
    layer = trainer._executor._runner.layer
    monkeypatch.setattr(
        trainer._executor._runner, "layer", lambda i, w, hidden_TH, x: seen.append(len(hidden_TH)) or layer(i, w, hidden_TH, x)
    )  # fmt: skip
    (made,) = packs(data, lengths)
    (stats,) = trainer.log_probs([made])
    answers = sum(n for _, n in ROWS)
    assert set(seen) == {sum(PROMPTS.values()) + answers} == {made.num_computed}
    assert int((stats.log_probs_T != 0).sum()) == sum(len(s) - 1 for s in data)
    trainer.close()


def test_a_change_in_one_answer_changes_no_other(tmp_path, device):
    trainer = sharing(tiny.saved(tiny.model(tiny.config()), tmp_path), device=device)
    data, lengths = grouped()
    changed = list(data)
    changed[2] = torch.cat([data[2][:-1], (data[2][-1:] + 1) % tiny.VOCAB])
    (before,), (after,) = (trainer.log_probs(packs(d, lengths)) for d in (data, changed))
    (pack,) = packs(data, lengths)
    bounds = pack.cu_seqlens.tolist()
    for s, row in enumerate(pack.sequence_ids):
        part = slice(bounds[s], bounds[s + 1])
        same = torch.equal(before.log_probs_T[part], after.log_probs_T[part])
        assert same == (row != 2), row
    trainer.close()


def test_only_the_predicted_tokens_count(tmp_path, device):
    """As VERL asks: from the prompt's last token on."""
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path)
    data, lengths = grouped()
    predict = [torch.arange(len(s)) >= n - 1 for s, n in zip(data, lengths, strict=True)]
    results = []
    for prompts in (None, lengths):
        trainer = sharing(directory, device=device)
        out, gradients = step(trainer, packs(data, prompts, predict=predict), tiny.token_weights(data))
        results.append((out, gradients))
        trainer.close()
    assert torch.allclose(results[0][0].stats[0].log_probs_T, results[1][0].stats[0].log_probs_T, atol=2e-5)
    for name, gradient in results[1][1].items():
        assert relative(gradient, results[0][1][name]) < 1e-4, name


def test_gradients_of_copies_are_summed_in_fp32():
    """In bf16 a small gradient would be lost beside a large one."""
    values = torch.zeros(1, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    copies = _Copies.apply(values, torch.zeros(257, dtype=torch.int64))
    gradient = torch.full((257, 1, 2), 1 / 256, dtype=torch.bfloat16)
    gradient[0] = 1.0
    copies.backward(gradient)
    assert values.grad.flatten().tolist() == [2.0, 2.0]


def test_what_is_copied_has_its_memory(tmp_path):
    """Copies of keys and values count as a share of a token, in the cut as in the check."""
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path)
    plain, shared = (sharing(directory, share_prompts=s) for s in (False, True))
    assert plain.plan.repeat_cost == 0 and 0 < shared.plan.repeat_cost < 0.2
    assert shared.plan.max_pack_tokens <= plain.plan.max_pack_tokens
    data, lengths = grouped([("c", 5)] * 40)
    made = packs(data, lengths, max_tokens=100, repeat_cost=shared.plan.repeat_cost)
    assert len(made) > 1 and all(shared.plan.counted_tokens(p) <= 100 for p in made)
    assert len(made) > len(packs(data, lengths, max_tokens=120))
    with pytest.raises(ValueError, match="gpu_budget_gb"):
        huge = packs(*grouped([("a", shared.plan.max_pack_tokens - 1)]), max_tokens=10**9)
        check_packs(shared.plan, shared.config, huge, vocab_size=tiny.VOCAB)
    with pytest.raises(ValueError, match="share_prompts=true"):
        plain.log_probs(made)
    plain.close()
    shared.close()


def test_hidden_states_that_predict_several_have_their_memory(tmp_path):
    """Where every token is predicted from, those of the prompts are summed in fp32."""
    spec = decoder_spec(tiny.config())
    plain, shared = (
        make_plan(spec, StreamConfig(share_prompts=s), AdamWConfig(), reference=False) for s in (False, True)
    )
    assert shared.costs.head_token - plain.costs.head_token == 4 * spec.hidden_size


@pytest.mark.gpu
def test_compiled_layers(tmp_path):
    """As close to fp32 as without sharing, and nothing is compiled again for packs of other sizes."""
    model = tiny.model(tiny.config(), dtype=torch.bfloat16, device="cuda")
    directory = tiny.saved(model, tmp_path)
    cases = [grouped([("a", n) for n in lengths]) for lengths in ((6, 9, 12, 20), (3, 7, 30, 15, 40), (50, 60))]
    model, errors, graphs = model.float(), {}, []
    for share in (False, True):
        trainer = sharing(
            directory, device="cuda", pack_tokens=512, param_dtype="bfloat16", compile=True, share_prompts=share
        )
        errors[share] = 0.0
        for data, lengths in cases:
            weights = tiny.token_weights(data)
            model.zero_grad()
            oracle_loss(model, data, weights, 1.0, 0.3).backward()
            _, gradients = step(trainer, packs(data, lengths if share else None, max_tokens=512), weights)
            exact = {n: p.grad.cpu() for n, p in model.named_parameters()}
            errors[share] += sum(float((gradients[n] - g).square().sum()) for n, g in exact.items())
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        trainer.close()
    assert errors[True] <= 1.2 * errors[False]
    assert len(set(graphs[3:])) == 1, graphs
