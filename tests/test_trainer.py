"""The streamed step against the oracle: loss, every gradient, weights after several steps; fp32 near-exact, bf16 no
worse than eager bf16 judged against fp32."""

import contextlib
import dataclasses
import gc
import threading
import types
import weakref

import oracle
import pytest
import tiny
import torch

from megatrain_rl.batch import pack_sequences
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.model.decoder import decoder_spec
from megatrain_rl.objectives import NegativeLogLikelihood, ObjectiveOutput
from megatrain_rl.ops.adamw import join_master
from megatrain_rl.optim import masters
from megatrain_rl.optim.lr_schedule import LRSchedule
from megatrain_rl.streaming import executor
from megatrain_rl.streaming.executor import StreamExecutor
from megatrain_rl.trainer import StreamTrainer
from megatrain_rl.transfer.lanes import Lanes


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def oracle_loss(model, data, weights, temperature, entropy):
    stats = oracle.token_stats(model, data, [temperature] * len(data))
    total = 0.0
    for log_p, h, w in zip(stats.log_probs, stats.entropies, weights, strict=True):
        w = w[:-1].to(log_p.device)
        total = total - (w * log_p).sum() - entropy * (w * h).sum()
    return total / 50


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_gradients_and_weights_equal_the_oracle(tmp_path, family, tied, device):
    """Three steps. Each link is tight: gradients at equal weights, then weights after equal gradients. (Left to itself
    the oracle drifts: where a gradient is rounding noise, Adam turns the noise into steps of full size.)"""
    model = tiny.model(tiny.config(family, tied=tied), device=device)
    data, adamw = tiny.sequences(), AdamWConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.5)
    weights = tiny.token_weights(data)
    trainer = tiny.trainer(tiny.saved(model, tmp_path), device=device, adamw=adamw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=adamw.lr, weight_decay=adamw.weight_decay)
    objective = tiny.WeightedLoss(weights, entropy=0.3)
    for _ in range(3):
        out = trainer.forward_backward(tiny.packs(data, temperature=0.7), objective, entropy=True)
        loss = oracle_loss(model, data, weights, 0.7, 0.3)
        loss.backward()
        assert sum(out.losses) == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        gradients = dict(trainer.named_gradients())
        assert gradients.keys() == {n for n, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            # each within 1e-5 of itself or, where it is all but zero (a key's bias), of the whole gradient
            error = (gradients[name].cpu().double() - parameter.grad.cpu().double()).norm().item()
            assert error <= 1e-5 * parameter.grad.norm().item() + 1e-6 * total, name
            parameter.grad.copy_(gradients[name])
        result = trainer.optim_step()
        norm = oracle.adamw_step(model, optimizer, adamw.clip_grad)
        assert result.stepped and result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert norm > adamw.clip_grad  # clipping was at work
        for name, weight in trainer.named_parameters():
            parameter = model.get_parameter(name)
            assert torch.allclose(weight, parameter.detach().cpu(), rtol=1e-6, atol=1e-7), name
            parameter.data.copy_(weight)
    trainer.close()


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_every_layer_count(tmp_path, layers, device):
    model = tiny.model(tiny.config(layers=layers), device=device)
    data = tiny.sequences()
    weights = tiny.token_weights(data)
    trainer = tiny.trainer(tiny.saved(model, tmp_path), device=device)
    trainer.forward_backward(tiny.packs(data), tiny.WeightedLoss(weights))
    oracle_loss(model, data, weights, 1.0, 0.0).backward()
    gradients = dict(trainer.named_gradients())
    for name, parameter in model.named_parameters():
        if "k_proj.bias" not in name:
            assert relative(gradients[name], parameter.grad) < 2e-5, name
    trainer.close()


def test_gradients_add_up_over_calls(tmp_path, device):
    """Two calls before a step give the gradient of their sum, the tied matrix included."""
    model = tiny.model(tiny.config(tied=True))
    data = tiny.sequences()
    objective = tiny.WeightedLoss(tiny.token_weights(data))
    trainer = tiny.trainer(tiny.saved(model, tmp_path), device=device)
    trainer.forward_backward(tiny.packs(data), objective)
    whole = {n: g.clone() for n, g in trainer.named_gradients()}
    trainer.zero_grad()
    cut = tiny.packs(data)
    assert len(cut) >= 3
    trainer.forward_backward(cut[:1], objective)
    trainer.forward_backward(cut[1:], objective)
    for name, gradient in trainer.named_gradients():
        assert relative(gradient, whole[name]) < 1e-5 or "k_proj.bias" in name, name
    trainer.close()


def test_bf16_is_no_worse_than_eager(tmp_path, device):
    """Gradients of the same bf16 weights: distance to fp32's, streamed against eager."""
    exact = tiny.model(tiny.config(), dtype=torch.bfloat16).float().to(device)
    eager = tiny.model(tiny.config(), dtype=torch.bfloat16, device=device)
    data = tiny.sequences((40, 64, 17, 80))
    weights = tiny.token_weights(data)
    trainer = tiny.trainer(
        tiny.saved(eager, tmp_path), device=device, param_dtype="bfloat16", grad_dtype="bfloat16", pack_tokens=128
    )
    trainer.forward_backward(tiny.packs(data, max_tokens=128), tiny.WeightedLoss(weights))
    for model in (exact, eager):
        oracle_loss(model, data, weights, 1.0, 0.0).backward()
    streamed = dict(trainer.named_gradients())
    truth = {n: p.grad for n, p in exact.named_parameters()}
    ours = torch.stack([(streamed[n].double().cpu() - g.double().cpu()).norm() for n, g in truth.items()])
    theirs = torch.stack([(p.grad.double() - truth[n].double()).norm().cpu() for n, p in eager.named_parameters()])
    assert ours.norm() <= 1.05 * theirs.norm()
    assert (ours <= 1.5 * theirs + 1e-4 * truth["lm_head.weight"].norm().cpu()).all()
    trainer.close()


def test_small_learning_rate_moves_bf16_masters(tmp_path):
    """At lr 1e-6 a bf16 weight rarely changes; its fp32 master always does, by what fp32 AdamW does."""
    model = tiny.model(tiny.config(), dtype=torch.bfloat16)
    directory = tiny.saved(model, tmp_path)
    exact = tiny.model(tiny.config(), dtype=torch.bfloat16).float()
    trainer = tiny.trainer(
        directory, param_dtype="bfloat16", adamw=AdamWConfig(lr=1e-6, weight_decay=0.0, clip_grad=None)
    )
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-6, weight_decay=0.0)
    data = tiny.sequences()
    for _ in range(4):
        trainer.forward_backward(tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data)))
        for name, gradient in trainer.named_gradients():
            exact.get_parameter(name).grad = gradient.float().clone()
        trainer.optim_step()
        optimizer.step()
    trainer.synchronize()
    for block in trainer.spec.blocks:
        state = trainer._optimizer.state[block.name]
        master = join_master(trainer._store.read(block), state.residual)
        for name in block.layout.slots:
            expected = exact.get_parameter(block.names[name])
            assert (block.layout.view(master, name) - expected).abs().max() <= 2e-7, name
    trainer.close()


def test_a_schedule_cannot_change_the_base_rate(tmp_path):
    """What a schedule gives is a factor: the rates are AdamWConfig.lr times it."""
    directory = tiny.saved(tiny.model(tiny.config(layers=1)), tmp_path)
    trainer = tiny.trainer(directory, adamw=AdamWConfig(lr=2e-6))
    assert trainer.lr == 2e-6
    trainer.schedule = LRSchedule(warmup_steps=4)
    packs, rates = tiny.packs(tiny.sequences()), []
    for _ in range(6):
        expected = trainer.lr
        trainer.forward_backward(packs, NegativeLogLikelihood(packs), final=True)
        rates.append(trainer.optim_step().lr)
        assert rates[-1] == expected
        trainer.schedule.step()
    assert rates == [2e-6 * factor for factor in (0, 0.25, 0.5, 0.75, 1, 1)]
    with pytest.raises(TypeError, match="base_lr"):
        LRSchedule(base_lr=1e-3)
    trainer.close()


def test_no_predicted_token(tmp_path, device):
    """A pack with nothing to predict adds nothing and breaks nothing."""
    model = tiny.model(tiny.config())
    data = tiny.sequences((8, 8))
    trainer = tiny.trainer(tiny.saved(model, tmp_path), device=device)
    nothing = [torch.zeros(8, dtype=torch.bool), torch.zeros(8, dtype=torch.bool)]
    packs = pack_sequences(data, max_tokens=8, predict=nothing)
    out = trainer.forward_backward(packs, NegativeLogLikelihood(packs), entropy=True)
    assert out.losses == [0.0, 0.0] and not out.nonfinite_loss
    assert all(g.abs().max() == 0 for _, g in trainer.named_gradients())
    trainer.zero_grad()
    with pytest.raises(ValueError, match="no gradients"):
        next(trainer.named_gradients())
    trainer.forward_backward(packs, NegativeLogLikelihood(packs))
    assert trainer.optim_step().grad_norm == 0.0
    trainer.close()


def test_predict_mask_selects_log_probs(tmp_path, device):
    """Masked positions are exactly 0; the others are what they are without a mask, also under temperature per
    sequence."""
    model = tiny.model(tiny.config(), device=device)
    data = tiny.sequences((12, 7, 20))
    temperature = [0.5, 1.0, 1.7]
    trainer = tiny.trainer(tiny.saved(model, tmp_path), device=device)
    predict = [torch.arange(len(s)) >= 4 for s in data]
    (pack,) = tiny.packs(data, predict=predict, temperature=temperature)
    (stats,) = trainer.log_probs([pack], entropy=True)
    truth = oracle.token_stats(model, data, temperature)
    for i, (start, end) in enumerate(zip(pack.cu_seqlens[:-1], pack.cu_seqlens[1:], strict=True)):
        row = pack.sequence_ids[i]
        for ours, theirs in (
            (stats.log_probs_T, truth.log_probs[row]), (stats.entropy_T, truth.entropies[row])
        ):  # fmt: skip
            assert (ours[start : start + 4] == 0).all() and ours[end - 1] == 0
            assert torch.allclose(ours[start + 4 : end - 1], theirs[4:].detach().cpu(), atol=2e-5)
    trainer.close()


def test_nonfinite_loss_skips_the_step(tmp_path):
    model = tiny.model(tiny.config())
    data = tiny.sequences()
    trainer = tiny.trainer(tiny.saved(model, tmp_path))
    objective = tiny.WeightedLoss(tiny.token_weights(data))
    trainer.forward_backward(tiny.packs(data), objective)
    before = {n: g.clone() for n, g in trainer.named_gradients()}

    class Poisoned:
        def __call__(self, stats, pack):
            return ObjectiveOutput(loss=stats.log_probs_T.sum() * float("nan"))

    out = trainer.forward_backward(tiny.packs(data), Poisoned())
    assert out.nonfinite_loss
    assert all(torch.equal(g, before[n]) for n, g in trainer.named_gradients())
    state = {
        b.name: {k: t.clone() for k, t in trainer._optimizer.state[b.name].tensors().items()}
        for b in trainer.spec.blocks
    }
    weights = {n: w.clone() for n, w in trainer.named_parameters()}
    result = trainer.optim_step()
    assert not result.stepped and result.skipped_steps == 1 and result.grad_norm != result.grad_norm
    assert all(torch.equal(w, weights[n]) for n, w in trainer.named_parameters())
    for block in trainer.spec.blocks:
        for key, tensor in trainer._optimizer.state[block.name].tensors().items():
            assert torch.equal(tensor, state[block.name][key])
    trainer.forward_backward(tiny.packs(data), objective)
    assert trainer.optim_step().stepped  # and it goes on
    trainer.close()


def test_infinite_gradient_skips_the_step(tmp_path):
    model = tiny.model(tiny.config())
    data = tiny.sequences()
    trainer = tiny.trainer(tiny.saved(model, tmp_path))

    class Steep:
        """Finite loss, infinite gradient: sqrt at 0."""

        def __call__(self, stats, pack):
            return ObjectiveOutput(loss=(stats.log_probs_T * 0).abs().sum().sqrt() + stats.log_probs_T.sum() * 0)

    out = trainer.forward_backward(tiny.packs(data), Steep())
    assert not out.nonfinite_loss
    weights = {n: w.clone() for n, w in trainer.named_parameters()}
    result = trainer.optim_step()
    assert not result.stepped and result.skipped_steps == 1
    assert all(torch.equal(w, weights[n]) for n, w in trainer.named_parameters())
    trainer.close()


@pytest.mark.parametrize("kept", ["mmap", "pinned"])
def test_reference_is_untouched_by_training_and_loading(tmp_path, kept, device):
    model = tiny.model(tiny.config())
    data = tiny.sequences()
    trainer = StreamTrainer.from_pretrained(
        tiny.saved(model, tmp_path / "m"),
        config=StreamConfig(reference=kept, pack_tokens=48, **tiny.FP32),
        adamw=AdamWConfig(lr=1e-2),
        device=device,
        reference=True,
    )
    packs = tiny.packs(data)
    start = [s.log_probs_T for s in trainer.log_probs(packs)]
    for _ in range(2):
        trainer.forward_backward(packs, tiny.WeightedLoss(tiny.token_weights(data)))
        trainer.optim_step()
    trainer.save_checkpoint(tmp_path / "c")
    trainer.load_checkpoint(tmp_path / "c")
    policy = [s.log_probs_T for s in trainer.log_probs(packs)]
    reference = [s.log_probs_T for s in trainer.log_probs(packs, weights="reference")]
    assert all(torch.equal(a, b) for a, b in zip(start, reference, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(start, policy, strict=True))
    trainer.close()


def test_old_and_new_log_probs_agree_on_equal_packs(tmp_path, device):
    """The same weights and packs give the same bits forward-only and inside a training sweep: the on-policy ratio is
    1."""
    data = tiny.sequences()
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path), device=device, checkpoint_interval=2)
    packs = tiny.packs(data, temperature=0.7)
    old = trainer.log_probs(packs)
    new = trainer.forward_backward(packs, tiny.WeightedLoss(tiny.token_weights(data))).stats
    assert all(torch.equal(a.log_probs_T, b.log_probs_T) for a, b in zip(old, new, strict=True))
    trainer.close()


def test_sliding_window_layers(tmp_path, device):
    """Layers of equal shape but different attention are different structural groups."""
    config = tiny.config(layers=4, use_sliding_window=True, sliding_window=6, max_window_layers=2)
    assert len(set(config.layer_types)) == 2
    model = tiny.model(config, device=device)
    data = tiny.sequences((30, 5, 17))
    trainer = tiny.trainer(tiny.saved(model, tmp_path), device=device, pack_tokens=64)
    (stats,) = trainer.log_probs(tiny.packs(data, max_tokens=64))
    assert torch.allclose(stats.log_probs_T, oracle.log_probs_T(model, data), atol=2e-5)
    trainer.close()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_scaling_holds_at_long_positions(tmp_path, rope):
    model = tiny.model(tiny.config("llama", layers=2, rope_parameters={"rope_theta": 10000.0, **rope}))
    data = tiny.sequences((150, 20))
    trainer = tiny.trainer(tiny.saved(model, tmp_path), pack_tokens=200)
    (stats,) = trainer.log_probs(tiny.packs(data, max_tokens=200))
    assert torch.allclose(stats.log_probs_T, oracle.log_probs_T(model, data), atol=2e-5)
    trainer.close()


def test_rope_that_depends_on_the_longest_sequence_is_refused():
    config = tiny.config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ValueError, match="rope_type='dynamic'"):
        decoder_spec(config)


def master(trainer, block):
    """fp32 master weights of a block, flat."""
    trainer.synchronize()
    return join_master(trainer._store.read(block), trainer._optimizer.state[block.name].residual)


def test_optimizer_names_agree(tmp_path):
    """`torch` steps the same exact master as `native`, to fp32 rounding."""
    data = tiny.sequences()
    directory = tiny.saved(tiny.model(tiny.config(), dtype=torch.bfloat16), tmp_path)
    results = []
    for optimizer in ("native", "torch"):
        trainer = tiny.trainer(directory, optimizer=optimizer, param_dtype="bfloat16", adamw=AdamWConfig(lr=1e-4))
        start = [master(trainer, b).clone() for b in trainer.spec.blocks]
        for _ in range(2):
            trainer.forward_backward(tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data)))
            trainer.optim_step()
        end = [master(trainer, b).clone() for b in trainer.spec.blocks]
        moments = [trainer._optimizer.state[b.name] for b in trainer.spec.blocks]
        results.append((start, end, moments))
        trainer.close()
    for start, ours, theirs in zip(results[0][0], results[0][1], results[1][1], strict=True):
        assert (ours - start).abs().max() > 1e-5
        # two steps: where a gradient is rounding noise the second one may already differ in sign
        assert ((ours - theirs).abs() <= 1e-7 + 1e-5 * ours.abs()).float().mean() > 0.98
    for ours, theirs in zip(results[0][2], results[1][2], strict=True):
        assert torch.allclose(ours.exp_avg, theirs.exp_avg, rtol=1e-3, atol=1e-5)


def test_loaded_fp32_weights_are_the_masters(tmp_path):
    """Replacing weights replaces the master exactly: residuals of earlier weights would revert the model in part."""
    model = tiny.model(tiny.config())
    data = tiny.sequences()
    trainer = tiny.trainer(tiny.saved(model, tmp_path), param_dtype="bfloat16", adamw=AdamWConfig(lr=1e-2))
    trainer.forward_backward(tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data)))
    trainer.optim_step()
    new = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    trainer.load_named_parameters(new.items())
    for block in trainer.spec.blocks:
        flat = master(trainer, block)
        for name in block.layout.slots:
            assert torch.equal(block.layout.view(flat, name), new[block.names[name]])
    with pytest.raises(ValueError, match=r"'no\.such'"):
        trainer.load_named_parameters([("no.such", torch.zeros(1))])
    trainer.close()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda new: new.update({"no.such": torch.zeros(1)}), r"no\.such"),
        (lambda new: new.update({"model.norm.weight": torch.zeros(3)}), r"model\.norm\.weight.*shape"),
        (lambda new: new["model.norm.weight"].fill_(float("nan")), r"model\.norm\.weight.*NaN"),
        (lambda new: new.update({"model.norm.weight": torch.ones(64, dtype=torch.int64)}), "int64"),
    ],
    ids=["name", "shape", "value", "dtype"],
)
def test_weights_are_replaced_all_or_none(tmp_path, spoil, message):
    """The fault is in the last of them."""
    model = tiny.model(tiny.config())
    trainer = tiny.trainer(tiny.saved(model, tmp_path))
    before = {n: w.clone() for n, w in trainer.named_parameters()}
    new = {
        n: torch.randn_like(p)
        for n, p in sorted(model.named_parameters(), key=lambda item: item[0] == "model.norm.weight")
    }
    spoil(new)
    with pytest.raises(ValueError, match=message):
        trainer.load_named_parameters(iter(new.items()))
    with pytest.raises(ValueError, match="twice"):
        trainer.load_named_parameters([("lm_head.weight", torch.ones(tiny.VOCAB, 64))] * 2)
    assert all(torch.equal(w, before[n]) for n, w in trainer.named_parameters())
    trainer.close()


def test_weights_are_not_replaced_under_waiting_gradients(tmp_path):
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    data = tiny.sequences()
    trainer.forward_backward(tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data)))
    with pytest.raises(ValueError, match=r"load_named_parameters.*zero_grad"):
        trainer.load_named_parameters([("model.norm.weight", torch.ones(64))])
    assert trainer._update.gradients.complete, "they still wait"
    trainer.zero_grad()
    trainer.load_named_parameters([("model.norm.weight", torch.ones(64))])
    trainer.close()


@pytest.mark.parametrize("token", [-1, -100, tiny.VOCAB, 2**40])
def test_a_token_that_the_model_does_not_know(tmp_path, token):
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    packs = tiny.packs([torch.tensor([1, 2, token, 3])])
    for call in (
        lambda: trainer.log_probs(packs),
        lambda: trainer.forward_backward(packs, NegativeLogLikelihood(packs)),
    ):
        with pytest.raises(ValueError, match=rf"token id {token}\b.*{tiny.VOCAB - 1}"):
            call()
    trainer.close()


@pytest.mark.parametrize(
    "returned, message",
    [
        (1.0, "float"), (None, "NoneType"), (torch.ones(()), "Tensor"), (ObjectiveOutput(loss=0.5), "float"),
        (ObjectiveOutput(loss=torch.ones(2)), r"shape \(2,\)"), (ObjectiveOutput(loss=torch.ones((), dtype=torch.int64)), "int64"),
    ],
    ids=["float", "none", "tensor", "loss-float", "loss-shape", "loss-int"],
)  # fmt: skip
def test_an_objective_that_returns_something_else(tmp_path, returned, message):
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    packs = tiny.packs(tiny.sequences())
    with pytest.raises(ValueError, match=rf"ObjectiveOutput.*{message}"):
        trainer.forward_backward(packs, lambda stats, pack: returned)
    with pytest.raises(ValueError, match="no gradients"):
        next(trainer.named_gradients())
    trainer.close()


@pytest.mark.parametrize("kept", ["mmap", "pinned"])
def test_reference_and_policy_round_an_fp32_checkpoint_alike(tmp_path, kept):
    """Values half-way between two bf16 numbers: the policy's, the reference's and a forward-only trainer's weights
    agree."""
    model = tiny.model(tiny.config())
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.view(torch.int32)
            parameter.copy_(((bits & -65536) | 0x8000).view(torch.float32))  # every value a tie
    directory = tiny.saved(model, tmp_path)
    knobs = dict(param_dtype="bfloat16", grad_dtype="bfloat16", pack_tokens=48, cpu_threads=1)
    packs = tiny.packs(tiny.sequences())
    results = []
    for adamw in (AdamWConfig(), None):
        trainer = StreamTrainer.from_pretrained(
            directory, config=StreamConfig(reference=kept, **knobs), adamw=adamw, device="cpu", reference=True
        )
        results += [trainer.log_probs(packs), trainer.log_probs(packs, weights="reference")]
        trainer.close()
    for other in results[1:]:
        assert all(torch.equal(a.log_probs_T, b.log_probs_T) for a, b in zip(results[0], other, strict=True))


def test_padding_token_gets_no_embedding_gradient(tmp_path):
    """As in transformers: the row of pad_token_id learns nothing from the input side, and from a tied head it does."""
    for tied in (False, True):
        model = tiny.model(tiny.config(tied=tied, pad_token_id=7))
        data = [torch.tensor([1, 7, 3, 7, 7, 5]), torch.tensor([7, 2, 9])]
        weights = tiny.token_weights(data)
        trainer = tiny.trainer(tiny.saved(model, tmp_path / str(tied)))
        trainer.forward_backward(tiny.packs(data), tiny.WeightedLoss(weights))
        oracle_loss(model, data, weights, 1.0, 0.0).backward()
        ours = dict(trainer.named_gradients())["model.embed_tokens.weight"]
        theirs = model.get_parameter("model.embed_tokens.weight").grad
        assert torch.allclose(ours, theirs, atol=1e-5)
        assert (ours[7].abs().max() > 0) == tied
        trainer.close()


def test_a_failed_sweep_leaves_nothing_to_step_with(tmp_path, monkeypatch):
    """An error in the middle of backward: the gradients of the blocks that were done never reach an update."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    data = tiny.sequences()
    packs, objective = tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data))
    trainer.forward_backward(packs, objective)
    backward, calls = trainer._executor._backward_visit, []

    def fail_at_layer_two(visit, *args):
        calls.append(visit.layer)
        if visit.layer == 2:
            raise OSError("the cable fell out")
        backward(visit, *args)

    monkeypatch.setattr(trainer._executor, "_backward_visit", fail_at_layer_two)
    with pytest.raises(OSError):
        trainer.forward_backward(packs, objective)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"^optim_step .*forward_backward"):
        trainer.optim_step()
    fresh = tiny.trainer(tmp_path)
    for each in (trainer, fresh):
        each.forward_backward(packs, objective)
        each.optim_step()
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(trainer.named_parameters(), fresh.named_parameters(), strict=True)
    )
    trainer.close()
    fresh.close()


def test_error_of_the_optimizer_thread_reaches_the_caller(tmp_path, monkeypatch):
    """Whoever reads weights next gets it; a checkpoint heals the trainer."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path / "m"))
    data = tiny.sequences()
    packs, objective = tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data))
    trainer.save_checkpoint(tmp_path / "c")
    before = [s.log_probs_T for s in trainer.log_probs(packs)]
    step_block = trainer._optimizer._do

    def fail_at_layer_two(block, *args):
        if block.name == "layers.2":
            raise MemoryError("no room")
        step_block(block, *args)

    monkeypatch.setattr(trainer._optimizer, "_do", fail_at_layer_two)
    trainer.forward_backward(packs, objective)
    trainer.optim_step()
    for call in (lambda: trainer.log_probs(packs), trainer.synchronize, lambda: list(trainer.named_parameters())):
        with pytest.raises(RuntimeError, match=r"host optimizer.*checkpoint") as error:
            call()
        assert isinstance(error.value.__cause__, MemoryError)
    monkeypatch.undo()
    trainer.load_checkpoint(tmp_path / "c")
    assert all(torch.equal(a, b.log_probs_T) for a, b in zip(before, trainer.log_probs(packs), strict=True))
    trainer.close()


def test_head_gradient_is_not_kept_through_backward(tmp_path, monkeypatch):
    """The fp32 sum of the output matrix is gone before the layers' backward needs the memory."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    sums, seen = [], []
    new_sum, embedding_gradient = trainer._executor._sums.new, trainer._executor._embedding_gradient

    def watched_sum(block):
        made = new_sum(block)
        sums.append(weakref.ref(made))
        return made

    def look(*args):
        seen.extend(ref() is None for ref in sums)
        embedding_gradient(*args)

    monkeypatch.setattr(trainer._executor._sums, "new", watched_sum)
    monkeypatch.setattr(trainer._executor, "_embedding_gradient", look)
    data = tiny.sequences()
    trainer.forward_backward(tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data)))
    assert seen == [True]
    trainer.close()


def test_closed_trainer_says_so(tmp_path):
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    packs = tiny.packs(tiny.sequences())
    trainer.close()
    trainer.close()
    for call in (
        trainer.synchronize,
        trainer.zero_grad,
        trainer.optim_step,
        lambda: trainer.log_probs(packs),
        lambda: trainer.save_checkpoint(tmp_path / "c"),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_closed_trainer_holds_no_memory(tmp_path, device):
    """Also while it is still named, and it goes with its last name: nothing waits for the collector of circles."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path), device=device)
    packs, objective = tiny.packs(tiny.sequences()), tiny.WeightedLoss(tiny.token_weights(tiny.sequences()))
    trainer.forward_backward(packs, objective, final=True)
    trainer.optim_step()
    trainer.log_probs(packs)
    assert largest_tensor(trainer) > 10_000
    trainer.close()
    assert largest_tensor(trainer) < 100  # frequencies of the positions, norms
    gc.collect()
    gc.disable()
    try:
        inside = weakref.ref(trainer._executor)
        del trainer
        assert inside() is None
    finally:
        gc.enable()


def test_a_device_that_is_lost_does_not_keep_the_host(tmp_path, monkeypatch):
    """One part cannot be closed: the others are, and the error is told once."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    before = set(threading.enumerate())
    monkeypatch.setattr(Lanes, "synchronize", lambda self: raise_(RuntimeError("device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        trainer.close()
    assert largest_tensor(trainer) < 100 and {t.name for t in before - set(threading.enumerate())} >= {
        "grad-landings",
        "host-adamw",
    }
    trainer.close()


def test_the_error_that_ends_the_building_is_the_one_to_tell(tmp_path, monkeypatch):
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path)
    monkeypatch.setattr(masters, "write_master", lambda *args: raise_(ValueError("no such parameter")))
    monkeypatch.setattr(Lanes, "synchronize", lambda self: raise_(RuntimeError("device lost")))
    before = set(threading.enumerate())
    for build in (
        lambda: tiny.trainer(directory),
        lambda: StreamTrainer.from_config(
            tiny.config(), config=StreamConfig(**tiny.FP32), adamw=AdamWConfig(), device="cpu"
        ),
    ):
        with pytest.raises(ValueError, match="no such parameter"):
            build()
        assert set(threading.enumerate()) <= before


def test_a_reservation_that_fails_leaves_no_cap(tmp_path, monkeypatch):
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path)
    caps = []
    monkeypatch.setattr(executor, "cap_device_memory", lambda device, owner, cap: caps.append(cap))
    monkeypatch.setattr(executor, "DeviceReservation", lambda device, wanted: raise_(torch.OutOfMemoryError("full")))
    monkeypatch.setattr(executor, "within_budget", lambda device, wanted: contextlib.nullcontext())
    with pytest.raises(torch.OutOfMemoryError):
        tiny.trainer(directory)
    assert len(caps) == 2 and caps[0] > 0 and caps[1] is None


def raise_(error: Exception):
    raise error


def largest_tensor(owner: object) -> int:
    """Bytes of the largest tensor that `owner` and what it refers to keep; tensors without memory (meta) count
    nothing."""
    seen, waiting, largest = set(), [owner], 0
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type | types.ModuleType | types.FrameType):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            largest = max(largest, 0 if thing.is_meta else thing.untyped_storage().nbytes())
        elif isinstance(thing, types.FunctionType):  # without the globals of its module
            waiting += [cell.cell_contents for cell in thing.__closure__ or ()]
        else:
            waiting += gc.get_referents(thing)
    return largest


def test_the_caller_sees_the_plan_before_the_model_is_read(tmp_path, monkeypatch):
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path)
    seen = []
    write = masters.write_master
    monkeypatch.setattr(masters, "write_master", lambda *args: (seen.append("weights"), write(*args)))
    tiny.trainer(directory, on_reserved=lambda trainer: seen.append(trainer.plan.pack_tokens)).close()
    assert seen[:2] == [48, "weights"]


@pytest.mark.parametrize("where", ["the caller", "host memory"])
def test_a_trainer_that_is_not_built_leaves_nothing(tmp_path, monkeypatch, where):
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path)
    if where == "host memory":
        monkeypatch.setattr(StreamExecutor, "enable_training", lambda self, *args, **more: 1 / 0)
    closed = []
    close = StreamExecutor.close
    monkeypatch.setattr(StreamExecutor, "close", lambda self: (closed.append(self), close(self)))
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        tiny.trainer(directory, on_reserved=(lambda trainer: 1 / 0) if where == "the caller" else None)
    assert len(closed) == 1 and threading.active_count() == before


@pytest.mark.parametrize("pack_tokens", [None, 3], ids=["planned", "short"])
def test_warming_up_changes_nothing(tmp_path, device, pack_tokens):
    """The steps after it are those of a trainer that did not, to the bit; gradients that wait for their step stay."""
    directory = tiny.saved(tiny.model(tiny.config(tied=True)), tmp_path)
    data = tiny.sequences()
    packs = tiny.packs(data)
    results = []
    for warm in (False, True):
        trainer = tiny.trainer(directory, device=device, pack_tokens=pack_tokens)
        for _ in range(2):
            if warm:
                trainer.warm_up()
            trainer.forward_backward(packs, tiny.WeightedLoss(tiny.token_weights(data)))
            if warm:
                trainer.warm_up()
            assert trainer.optim_step().stepped
        weights = [tensor.clone() for _, tensor in trainer.named_parameters()]
        results.append((weights, [s.log_probs_T for s in trainer.log_probs(packs)]))
        trainer.close()
    for plain, warmed in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, warmed, strict=True))


def test_warming_up_a_forward_only_trainer(tmp_path):
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path)
    trainer = StreamTrainer.from_pretrained(directory, config=StreamConfig(**tiny.FP32), adamw=None, device="cpu")
    trainer.warm_up()
    trainer.close()


def test_refused_load_leaves_nothing_behind(tmp_path):
    """A checkpoint that does not fit is found before threads start and memory is taken."""
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path)
    tiny.config(intermediate_size=96).save_pretrained(directory)
    before = threading.active_count()
    with pytest.raises(ValueError, match=r"config\.json"):
        tiny.trainer(directory)
    assert threading.active_count() == before


@pytest.mark.parametrize("ring_in_head", [True, False])
def test_weights_and_head_gradient_are_not_held_together(tmp_path, monkeypatch, ring_in_head):
    """Where the budget is tight the weight slots come back only when the output matrix' fp32 sum is gone."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    executor = trainer._executor
    executor._plan = dataclasses.replace(trainer.plan, ring_in_head=ring_in_head)
    new_sum, begin = executor._sums.new, executor._ring.begin
    sums, seen = [], []

    def watched_sum(block):
        made = new_sum(block)
        sums.append(weakref.ref(made))
        return made

    def look(*args):
        seen.append((len(sums), sum(ref() is not None for ref in sums)))
        begin(*args)

    monkeypatch.setattr(executor._sums, "new", watched_sum)
    monkeypatch.setattr(executor._ring, "begin", look)
    packs = tiny.packs(tiny.sequences())
    trainer.forward_backward(packs, tiny.WeightedLoss(tiny.token_weights(tiny.sequences())))
    # forward, then backward: before the head's sum exists, or when it has gone
    assert seen == [(0, 0), (0, 0)] if ring_in_head else seen == [(0, 0), (1, 0)]
    trainer.close()


class NotANumber(tiny.WeightedLoss):
    def __call__(self, stats, pack):
        return ObjectiveOutput(loss=super().__call__(stats, pack).loss * float("nan"))


class Broken(tiny.WeightedLoss):
    def __call__(self, stats, pack):
        raise OSError("no reward")


@pytest.mark.parametrize("kind", [NotANumber, Broken])
def test_nothing_is_held_after_a_sweep_that_ended_early(tmp_path, kind):
    """A weight transfer may need the device memory next."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    packs, weights = tiny.packs(tiny.sequences()), tiny.token_weights(tiny.sequences())
    with pytest.raises(OSError) if kind is Broken else contextlib.nullcontext():
        trainer.forward_backward(packs, kind(weights))
    ring = trainer._executor._ring
    assert not ring._loaded and not ring._empty and not ring._order
    trainer.zero_grad()
    trainer.forward_backward(packs, tiny.WeightedLoss(weights))
    assert trainer.optim_step().stepped
    trainer.close()
