"""The native host AdamW against its torch reference, to the bit, and the exactness of the 2 + 2 byte master."""

import pytest
import torch

from megatrain_rl.ops import build
from megatrain_rl.ops.adamw import AdamWScalars, adamw_native, adamw_reference, join_master, split_master


def arrays(n, *, split, grad_dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(n, generator=generator)  # noqa: E731
    master = draw()
    weight, residual = (
        (torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)) if split else (master, None)
    )
    if split:
        split_master(master, weight, residual)
    return [weight, residual, (draw() * 3).to(grad_dtype), draw() * 0.1, draw().square()]


def clone(tensors):
    return [None if t is None else t.clone() for t in tensors]


@pytest.mark.parametrize("n", [1, 31, 32, 33, 1000, 100_003])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [1, 3])
def test_native_equals_reference_to_the_bit(n, split, grad_dtype, threads):
    native = arrays(n, split=split, grad_dtype=grad_dtype)
    reference = clone(native)
    for step in range(1, 4):
        scalars = AdamWScalars.of(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.37)
        adamw_native(*native, scalars, threads)
        adamw_reference(*reference, scalars)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(native, reference, strict=True))


@pytest.mark.parametrize("step_once", [adamw_native, adamw_reference])
def test_equals_torch_adamw(step_once):
    weight, residual, grad, m, v = arrays(5000, split=True, grad_dtype=torch.float32)
    m.zero_(), v.zero_()
    parameter = torch.nn.Parameter(join_master(weight, residual).clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    for step in range(1, 6):
        scalars = AdamWScalars.of(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2, step=step, grad_scale=0.5)
        step_once(weight, residual, grad, m, v, scalars, *((2,) if step_once is adamw_native else ()))
        parameter.grad = grad * 0.5
        optimizer.step()
    assert torch.allclose(join_master(weight, residual), parameter, rtol=2e-6, atol=1e-7)


def test_master_is_exact_for_every_kind_of_float():
    """All exponents, both signs, ties in both directions, zeros, infinities."""
    bits = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16) + 0x8000
    master = torch.cat([bits, ties]).view(torch.float32)
    weight, residual = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split_master(master, weight, residual)
    assert torch.equal(join_master(weight, residual).view(torch.int32), master.view(torch.int32))


def test_weight_is_the_nearest_bf16():
    master = torch.randn(100_000)
    weight, residual = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split_master(master, weight, residual)
    assert ((weight.float() - master).abs() <= (master.bfloat16().float() - master).abs()).all()


def test_tiny_learning_rate_moves_the_master_not_the_weight():
    weight, residual, grad, m, v = arrays(10_000, split=True, grad_dtype=torch.bfloat16)
    before, high = join_master(weight, residual).clone(), weight.clone()
    m.zero_(), v.zero_()
    scalars = AdamWScalars.of(lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=1, grad_scale=1.0)
    adamw_native(weight, residual, grad, m, v, scalars, 1)
    moved = join_master(weight, residual) - before
    assert (moved.abs() > 0).float().mean() > 0.95
    assert (weight != high).float().mean() < 0.01


def test_missing_compiler_is_one_clear_error(monkeypatch):
    build.load_library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="needs a C\\+\\+ compiler.*set CXX, or set optimizer=torch"):
        build.load_library("adamw")
    build.load_library.cache_clear()


def test_failed_build_says_what_the_compiler_said(monkeypatch, tmp_path):
    build.load_library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", ("--no-such-flag",))
    with pytest.raises(RuntimeError, match="no-such-flag"):
        build.load_library("adamw")
    assert not list(tmp_path.rglob("*.so"))
    build.load_library.cache_clear()
