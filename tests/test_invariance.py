"""What must not change results: how packs are cut, ring depth, slabs, checkpoint interval, where hidden states wait."""

import dataclasses

import pytest
import tiny
import torch

from megatrain_rl.config import AdamWConfig
from megatrain_rl.trainer import StreamTrainer


def run(directory, device, *, steps=3, resident_bytes=None, max_tokens=48, tied=False, **knobs):
    """Weights, moments and statistics after `steps` steps."""
    trainer: StreamTrainer = tiny.trainer(
        directory, device=device, adamw=AdamWConfig(lr=1e-3), pack_tokens=max_tokens, **knobs
    )
    if resident_bytes is not None:
        trainer._executor._plan = dataclasses.replace(trainer.plan, resident_bytes=resident_bytes)
    data = tiny.sequences()
    objective = tiny.WeightedLoss(tiny.token_weights(data), entropy=0.1)
    stats = []
    for _ in range(steps):
        out = trainer.forward_backward(tiny.packs(data, max_tokens=max_tokens), objective, entropy=True)
        stats += [s.log_probs_T for s in out.stats]
        trainer.optim_step()
    trainer.synchronize()
    result = {n: w.clone() for n, w in trainer.named_parameters()}
    for block in trainer.spec.blocks:
        for key, tensor in trainer._optimizer.state[block.name].tensors().items():
            result[f"{block.name}.{key}"] = tensor.clone()
    trainer.close()
    return result, stats


def assert_bitwise(a, b):
    assert a[0].keys() == b[0].keys()
    different = [name for name in a[0] if not torch.equal(a[0][name], b[0][name])]
    assert not different
    assert all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_transfer_settings_change_no_bit(tmp_path, device, deterministic, tied, dtype):
    directory = tiny.saved(tiny.model(tiny.config(layers=7, tied=tied)), tmp_path)
    types = dict(param_dtype=dtype, grad_dtype=dtype)
    base = run(directory, device, **types)
    for knobs in (
        dict(ring_depth=1),
        dict(ring_depth=3),
        dict(ring_depth=12),
        dict(num_grad_slabs=1),
        dict(num_grad_slabs=3),
        dict(checkpoint_interval=2),
        dict(checkpoint_interval=3),
        dict(checkpoint_interval=7),
        dict(checkpoint_interval=50),
        dict(resident_bytes=0),  # every pack's hidden states through the host
        dict(resident_bytes=0, checkpoint_interval=3),
        dict(resident_bytes=64 * 50 * (4 if dtype == "float32" else 2)),  # the first pack stays, the rest goes
    ):
        assert_bitwise(base, run(directory, device, **types, **knobs))


def test_one_pack_through_the_host_changes_no_bit(tmp_path, device, deterministic):
    """With a single pack nothing can be fetched ahead: a stale copy would be taken here."""
    directory = tiny.saved(tiny.model(tiny.config(layers=4)), tmp_path)
    base = run(directory, device, max_tokens=200)
    assert len(base[1]) == 3
    assert_bitwise(base, run(directory, device, max_tokens=200, resident_bytes=0))
    assert_bitwise(base, run(directory, device, max_tokens=200, resident_bytes=0, checkpoint_interval=3))


def test_pack_cutting_does_not_change_the_update(tmp_path, device):
    """Other packs, other order of summation: equal to fp32 rounding, gradient by gradient."""
    directory = tiny.saved(tiny.model(tiny.config()), tmp_path)
    data = tiny.sequences()
    objective = tiny.WeightedLoss(tiny.token_weights(data), entropy=0.1)
    gradients = []
    for max_tokens in (30, 48, 64, 200):
        trainer = tiny.trainer(directory, device=device, pack_tokens=max_tokens)
        out = trainer.forward_backward(tiny.packs(data, max_tokens=max_tokens), objective, entropy=True)
        gradients.append(({n: g.clone() for n, g in trainer.named_gradients()}, sum(out.losses)))
        trainer.close()
    whole = torch.cat([g.flatten() for g in gradients[0][0].values()]).norm()
    for other, loss in gradients[1:]:
        assert loss == pytest.approx(gradients[0][1], rel=1e-5)
        for name, gradient in other.items():
            assert (gradient - gradients[0][0][name]).norm() <= 1e-5 * gradient.norm() + 1e-6 * whole, name


@pytest.mark.parametrize("tied", [False, True])
def test_padding_changes_no_number(tmp_path, device, tied):
    """Packs padded to a multiple, as compiled layers want them: same losses, statistics and gradients to fp32 rounding,
    nothing flows into the padding and its token's embedding gets no gradient from it."""
    directory = tiny.saved(tiny.model(tiny.config(tied=tied)), tmp_path)
    data = [s % (tiny.VOCAB - 1) + 1 for s in tiny.sequences()]  # token 0, which padding uses, does not occur
    objective = tiny.WeightedLoss(tiny.token_weights(data), entropy=0.1)
    seen = []
    for multiple in (1, 32):
        trainer = tiny.trainer(directory, device=device)
        trainer._executor._pack_multiple = multiple
        packs = tiny.packs(data)
        assert any(p.num_tokens % 32 for p in packs)
        out = trainer.forward_backward(packs, objective, entropy=True)
        seen.append((out, {n: g.clone() for n, g in trainer.named_gradients()}))
        trainer.close()
    (plain, gradients), (padded, others) = seen
    assert padded.losses == pytest.approx(plain.losses, rel=1e-5)
    for a, b in zip(plain.stats, padded.stats, strict=True):
        assert torch.allclose(a.log_probs_T, b.log_probs_T, atol=1e-5)
        assert torch.allclose(a.entropy_T, b.entropy_T, atol=1e-5)
    whole = torch.cat([g.flatten() for g in gradients.values()]).norm()
    for name, gradient in others.items():
        assert (gradient - gradients[name]).norm() <= 1e-5 * gradient.norm() + 1e-6 * whole, name
    if not tied:
        assert others["model.embed_tokens.weight"][0].abs().max() == 0


def test_sequences_of_a_pack_do_not_see_each_other(tmp_path, device):
    """Changing one sequence changes no other sequence's log-probs by a bit."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path), device=device, pack_tokens=200)
    data = tiny.sequences((20, 31, 15))
    changed = [data[0], (data[1] + 1) % tiny.VOCAB, data[2]]
    (pack,) = tiny.packs(data, max_tokens=200)
    (before,), (after,) = (trainer.log_probs(tiny.packs(d, max_tokens=200)) for d in (data, changed))
    bounds = pack.cu_seqlens.tolist()
    assert pack.sequence_ids == (0, 1, 2)
    for i in (0, 2):
        part = slice(bounds[i], bounds[i + 1])
        assert torch.equal(before.log_probs_T[part], after.log_probs_T[part])
    assert not torch.equal(before.log_probs_T[bounds[1] : bounds[2]], after.log_probs_T[bounds[1] : bounds[2]])
    trainer.close()


def test_runs_repeat_to_the_bit_on_several_threads(tmp_path):
    """Sums whose order depends on thread timing would show: few tokens, each many times, in a pack large enough to be
    shared out."""
    directory = tiny.saved(tiny.model(tiny.config(layers=1)), tmp_path)
    data = [s % 20 for s in tiny.sequences((1500, 1200, 1300))]
    packs, objective = tiny.packs(data, max_tokens=4000), tiny.WeightedLoss(tiny.token_weights(data))
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        trainer = tiny.trainer(directory, pack_tokens=4000, cpu_threads=4)
        seen = []
        for _ in range(10):
            trainer.zero_grad()
            trainer.forward_backward(packs, objective)
            seen.append({n: g.clone() for n, g in trainer.named_gradients()})
        trainer.close()
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        assert [n for n in other if not torch.equal(other[n], seen[0][n])] == []
