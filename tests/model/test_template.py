"""A layer's backward: tapped linear layers against plain autograd, the traced graph against the untraced function."""

import gc
import weakref

import pytest
import tiny
import torch
import torch.nn.functional as F
import varlen_on_cpu  # noqa: F401  (torch's own attention runs on CUDA only)

from megatrain_rl.model.decoder import decoder_spec
from megatrain_rl.model.taps import LinearTaps
from megatrain_rl.model.template import LayerRunner, SharedInputs

CPU = torch.device("cpu")


def layer_inputs(runner, lengths, prompts=None):
    """prompts: how many tokens of each sequence are those of the first one; None: no sharing."""
    positions = [torch.arange(n) for n in lengths]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    shared = None
    if prompts is not None:
        keys, begin = [], 0
        for n, prompt in zip(lengths, prompts, strict=True):
            keys.append(torch.cat([torch.arange(prompt), torch.arange(begin, begin + n - prompt)]))
            begin += n - prompt
        computed = [n - prompt for n, prompt in zip(lengths, prompts, strict=True)]
        shared = SharedInputs(keys_T=torch.cat(keys), cu_queries=torch.tensor([0, *computed]).cumsum(0).int())
        positions = [p[prompt:] for p, prompt in zip(positions, prompts, strict=True)]
    return runner.inputs(torch.cat(positions), cu_seqlens, max_seqlen=max(lengths), keep_rotary=True, shared=shared)


def backward(runner, weights, lengths, *, prompts=None, seed=0):
    """Output, gradient of the input and sums of a layer on random hidden states."""
    generator = torch.Generator().manual_seed(seed)
    inputs = layer_inputs(runner, lengths, prompts)
    hidden_TH, grad_TH = (torch.randn(inputs.positions_1T.numel(), 64, generator=generator) for _ in range(2))
    sums = {name: torch.ones_like(weight) for name, weight in weights.items()}  # gradients are added to what is there
    with torch.no_grad():
        out_TH = runner.layer(0, weights, hidden_TH, inputs)
        grad_hidden_TH = runner.vjp(0, weights, hidden_TH, inputs, grad_TH, sums)
    return out_TH, grad_hidden_TH, sums, (hidden_TH, grad_TH, inputs)


def layer_weights(config):
    return {n: p.detach().clone() for n, p in tiny.model(config).model.layers[0].named_parameters()}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_vjp_equals_autograd(family):
    config = tiny.config(family, layers=1)
    runner = LayerRunner(decoder_spec(config), CPU, torch.float32, "sdpa", False)
    weights = layer_weights(config)
    out_TH, grad_hidden_TH, sums, (hidden_TH, grad_TH, inputs) = backward(runner, weights, [9, 1, 30])
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    hidden_TH.requires_grad_()
    true_out_TH = runner.layer(0, leaves, hidden_TH, inputs)
    true_out_TH.backward(grad_TH)
    assert torch.equal(out_TH, true_out_TH)
    assert torch.allclose(grad_hidden_TH, hidden_TH.grad, atol=1e-6)
    for name, leaf in leaves.items():
        assert torch.allclose(sums[name] - 1, leaf.grad, atol=2e-5), name


def test_taps_of_a_weight_used_twice_and_of_one_used_otherwise():
    """Every use is reported; what is not a linear layer's weight gets its gradient from autograd."""
    x = torch.randn(2, 5, 8)
    weights = {n: torch.randn(8, 8, requires_grad=True) for n in ("twice", "both")}
    scale = torch.randn(8, requires_grad=True)
    leaves = {**weights, "scale": scale}

    def run():
        y = F.linear(F.linear(x, weights["twice"], scale), weights["twice"])
        return (F.linear(y * scale, weights["both"]) @ weights["both"]).square().sum()

    truth = torch.autograd.grad(run(), list(leaves.values()))
    with LinearTaps(leaves) as recorder:
        loss = run()
    others = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    assert sorted(tap.weight for tap in recorder.taps) == ["both", "twice", "twice"]
    for name, exact, other in zip(leaves, truth, others, strict=True):
        ours = torch.zeros_like(exact) if other is None else other.clone()
        for tap in recorder.taps:
            if tap.weight == name:
                ours += tap.grad_TO.t() @ tap.input_TI
        assert torch.allclose(ours, exact, rtol=1e-4, atol=1e-3), name
    assert others[0] is None and others[1] is not None


def test_taps_keep_no_graph_alive():
    """Tensors that backward needed are gone when the taps are, without waiting for the garbage collector."""
    x = torch.randn(4, 8, requires_grad=True)
    weights = {n: torch.randn(8, 8, requires_grad=True) for n in "ab"}
    gc.disable()
    try:
        with LinearTaps(weights) as recorder:
            y = F.linear(F.linear(x * 2, weights["a"]).sin(), weights["b"])
        torch.autograd.grad(y.sum(), [x])
        assert len(recorder.taps) == 2
        seen = weakref.ref(recorder.taps[0].input_TI)
        del y, recorder
        assert seen() is None
    finally:
        gc.enable()


def test_tracing_drops_the_last_product(monkeypatch):
    """Recompute needs every product of the layer but the last, backward one for each linear layer's input."""
    graphs = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: graphs.append(f) or f)
    config = tiny.config(layers=1)
    runner = LayerRunner(decoder_spec(config), CPU, torch.float32, "varlen", True)
    graphs.clear()  # the forward
    backward(runner, layer_weights(config), [20, 12])
    products = [
        n for n in graphs[0].graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    ]
    assert len(products) == (7 - 1) + 7


PLAIN = [[40, 24], [33, 50, 45], [160], [1, 2, 3, 4, 300], [16, 16]]
# Lengths, and how much of each is the first one's; the last has nothing to share, and takes the same graph.
SHARED = [([40, 24], [0, 10]), ([33, 50, 45], [0, 20, 20]), ([160, 161], [0, 159]), ([64, 80, 90], [0, 16, 16]), ([16, 32], [0, 0])]  # fmt: skip


@pytest.mark.parametrize("packs", [[(lengths, None) for lengths in PLAIN], SHARED], ids=["plain", "shared"])
def test_one_graph_serves_packs_of_every_size(packs):
    """Compiled and not give the same numbers, and nothing is compiled again for other sizes.

    The sizes include a layer's own widths, which must not be taken for one another.
    """
    config = tiny.config(layers=1)
    spec, weights = decoder_spec(config), layer_weights(config)
    plain, compiled = (LayerRunner(spec, CPU, torch.float32, "varlen", c) for c in (False, True))
    torch._dynamo.utils.counters.clear()
    for lengths, prompts in packs:
        for ours, truth in zip(
            backward(compiled, weights, lengths, prompts=prompts)[:3],
            backward(plain, weights, lengths, prompts=prompts)[:3],
            strict=True,
        ):
            for name, exact in truth.items() if isinstance(truth, dict) else [("", truth)]:
                found = ours[name] if name else ours
                assert torch.allclose(found, exact, atol=5e-5), (lengths, name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_backends_agree_about_shared_prompts():
    """The kernels' alignment of few queries to many keys, and the exact path's."""
    config = tiny.config(layers=1)
    spec, weights = decoder_spec(config), layer_weights(config)
    for lengths, prompts in SHARED:
        results = [
            backward(LayerRunner(spec, CPU, torch.float32, backend, False), weights, lengths, prompts=prompts)[:3]
            for backend in ("varlen", "sdpa")
        ]
        (out, grad, sums), (exact_out, exact_grad, exact_sums) = results
        assert torch.allclose(out, exact_out, atol=2e-5) and torch.allclose(grad, exact_grad, atol=2e-5)
        for name, exact in exact_sums.items():
            assert torch.allclose(sums[name], exact, atol=1e-4), name


def test_a_runner_has_a_graph_for_either_kind():
    config = tiny.config(layers=1)
    spec, weights = decoder_spec(config), layer_weights(config)
    compiled = LayerRunner(spec, CPU, torch.float32, "varlen", True)
    plain = LayerRunner(spec, CPU, torch.float32, "varlen", False)
    for lengths, prompts in [(PLAIN[0], None), SHARED[1], (PLAIN[1], None), SHARED[0]]:
        ours, truth = (backward(runner, weights, lengths, prompts=prompts)[1] for runner in (compiled, plain))
        assert torch.allclose(ours, truth, atol=5e-5)
