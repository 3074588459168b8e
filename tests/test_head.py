"""Chunked log-probs and entropies against plain log_softmax and autograd; bf16 no worse than eager."""

import pytest
import torch

from megatrain_rl.head import Head, HeadStats, chunks

P, V, H = 37, 211, 48


def inputs(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(P, H, generator=generator)
    weight = torch.randn(V, H, generator=generator) * 0.3
    targets = torch.randint(0, V, (P,), generator=generator)
    temperature = torch.rand(P, generator=generator) + 0.3
    grads = torch.randn(2, P, generator=generator)
    return [x.to(device) for x in (hidden.to(dtype), weight.to(dtype), targets, temperature, *grads)]


def plain(hidden, weight, targets, temperature):
    logits = (hidden @ weight.t()).float() / temperature[:, None]
    log_p = torch.log_softmax(logits, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def by_chunks(hidden, weight, targets, temperature, chunk, *, compile=False):
    """Statistics of all rows, and their backward as a function, chunk by chunk."""
    head, rows = Head(compile=compile), chunks(len(hidden), chunk)
    parts = [head.forward(hidden[c], weight, targets[c], temperature[c], entropy=True) for c in rows]
    stats = HeadStats.concatenated(parts, entropy=True, device=hidden.device)

    def backward(g_log_p, g_entropy, total):
        grads = [
            head.backward(
                hidden[c], weight, targets[c], temperature[c], stats[c], g_log_p[c],
                None if g_entropy is None else g_entropy[c], total,
            )
            for c in rows
        ]  # fmt: skip
        return torch.cat([hidden[:0], *grads])

    return stats, backward


def test_chunks_cover_all_rows_once_and_are_even():
    for total in (0, 1, 63, 64, 1000, 8192):
        for limit in (1, 64, 100, 682, 2048):
            rows = chunks(total, limit)
            assert [i for c in rows for i in range(c.start, c.stop)] == list(range(total))
            assert all(c.stop - c.start <= limit for c in rows)
    assert [c.stop - c.start for c in chunks(8000, 2048)] == [2048, 2048, 2048, 1856]
    assert [c.stop - c.start for c in chunks(2100, 2048)] == [1088, 1012]  # not one full and a scrap


@pytest.mark.parametrize("chunk", [1, 8, 36, 37, 1000])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_equals_plain_in_fp32(device, chunk, with_entropy):
    hidden, weight, targets, temperature, g_log_p, g_entropy = inputs(device)
    stats, backward = by_chunks(hidden, weight, targets, temperature, chunk)
    leaf_hidden, leaf_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    true_log_p, true_entropy = plain(leaf_hidden, leaf_weight, targets, temperature)
    assert torch.allclose(stats.log_probs_P, true_log_p, atol=1e-5)
    assert torch.allclose(stats.entropy_P, true_entropy, atol=1e-5)
    ((true_log_p * g_log_p).sum() + with_entropy * (true_entropy * g_entropy).sum()).backward()
    total = torch.ones(V, H, device=device)  # gradients are added to what is there
    grad = backward(g_log_p, g_entropy if with_entropy else None, total)
    assert torch.allclose(grad, leaf_hidden.grad, atol=2e-5)
    assert torch.allclose(total - 1, leaf_weight.grad, atol=2e-5)


def test_no_entropy_asked_none_given(device):
    hidden, weight, targets, temperature, *_ = inputs(device)
    stats = Head(compile=False).forward(hidden, weight, targets, temperature, entropy=False)
    assert stats.entropy_P is None


def test_nothing_predicted(device):
    hidden, weight, targets, temperature, g, _ = (x[:0] if x.shape[0] == P else x for x in inputs(device))
    stats, backward = by_chunks(hidden, weight, targets, temperature, 8)
    assert stats.log_probs_P.shape == stats.entropy_P.shape == (0,)
    total = torch.zeros(V, H, device=device)
    assert backward(g, None, total).shape == (0, H)
    assert total.abs().max() == 0


def test_bf16_is_no_worse_than_eager(device):
    hidden, weight, targets, temperature, g_log_p, g_entropy = inputs(device, torch.bfloat16)
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        h, w = hidden.to(dtype).clone().requires_grad_(), weight.to(dtype).clone().requires_grad_()
        log_p, entropy = plain(h, w, targets, temperature)
        ((log_p * g_log_p).sum() + (entropy * g_entropy).sum()).backward()
        results.append([x.detach().double() for x in (log_p, entropy, h.grad, w.grad)])
    total = torch.zeros(V, H, device=device)
    stats, backward = by_chunks(hidden, weight, targets, temperature, 16)
    grad = backward(g_log_p, g_entropy, total)
    for ours, exact, eager in zip((stats.log_probs_P, stats.entropy_P, grad, total), *results, strict=True):
        assert (ours.double() - exact).norm() <= 1.05 * (eager - exact).norm()
