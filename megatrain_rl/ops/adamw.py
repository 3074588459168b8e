"""The host AdamW step on one flat range, and its inverse: native op and torch reference. Also here: the split of an
fp32 master into 2 + 2 bytes.

Update (Loshchilov & Hutter 2019, algorithm 2, as in `torch.optim.AdamW`), with g the scaled gradient:
    m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2
    w <- w (1 - lr wd) - (lr / (1-b1^t)) m / (sqrt(v) / sqrt(1-b2^t) + eps)
Native and reference do the same operations in the same order in fp32, each rounded once, so they agree to the bit.
Moments in bf16 are rounded stochastically (an update smaller than half a unit in the last place still counts in the
mean) and used as they are stored; the random bits depend on `key` and the element's index alone.

A step that may have to be taken back is taken in two parts. GUARDED leaves out the elements whose g^2 is more than
`guard` times v, for which the inverse would lose m and v in rounding; FINISH steps those. UNDO solves the update for
the old w, m, v of what GUARDED stepped. GUARDED then FINISH is STEP to the bit. GUARDED marks where it left elements,
so that FINISH need not look through all.
"""

import ctypes
import enum
import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from megatrain_rl.ops.build import load_library


class Mode(enum.IntEnum):
    """Kind of a pass over a range; values of the native enum."""

    STEP = 0
    GUARDED = 1
    FINISH = 2
    UNDO = 3


# The native kGrain: elements that share a mark of what is left.
LEFT_GRAIN = 4096
# The native kNegligible.
_NEGLIGIBLE = 2.0**-100
# guard times (1 - beta2), by the moments' dtype. v then loses at most a few hundred (fp32) or 3 (bf16) units in the
# last place to an undone step; above 1, so that a stepped element is never taken for a left one.
_GUARDS = {torch.float32: 100.0, torch.bfloat16: 2.0}


@dataclass(frozen=True)
class AdamWScalars:
    """Constants of one step, in the order of the native struct."""

    beta1: float
    beta2: float
    one_minus_beta1: float
    one_minus_beta2: float
    decay: float
    step_size: float
    inv_sqrt_bias2: float
    eps: float
    grad_scale: float
    inv_beta1: float
    inv_beta2: float
    inv_decay: float
    guard: float

    @classmethod
    def of(
        cls,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
        moments: torch.dtype = torch.float32,
    ) -> "AdamWScalars":
        """step: 1 for the first update. grad_scale: factor on the gradients (clipping). moments: their dtype."""
        b1, b2 = betas
        decay = 1 - lr * weight_decay
        return cls(
            b1,
            b2,
            1 - b1,
            1 - b2,
            decay,
            lr / (1 - b1**step),
            1 / math.sqrt(1 - b2**step),
            eps,
            grad_scale,
            # a beta of 0 has no inverse, and the moment it wiped out is never read again
            1 / b1 if b1 else 0.0,
            1 / b2 if b2 else 0.0,
            1 / decay if decay else 0.0,
            _GUARDS[moments] / (1 - b2),
        )


def adamw_native(
    weight: Tensor,
    residual: Tensor | None,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    scalars: AdamWScalars,
    threads: int,
    *,
    key: int = 0,
    mode: Mode = Mode.STEP,
    left: Tensor | None = None,
) -> int:
    """Run one pass of `mode` in place on flat CPU tensors (N,). Returns how many elements are beyond the guard.

    weight: bf16 with an int16 residual, or fp32 with None. grad: bf16 or fp32. m, v: bf16 or fp32, both the same.
    key: 32 bits that choose the random bits of bf16 moments.
    left: uint8 (ceil(N / LEFT_GRAIN),), marks that GUARDED writes and FINISH goes by; None: FINISH goes through all.
    """
    _check(weight, residual, grad, m, v)
    assert left is None or (left.dtype == torch.uint8 and left.shape == (-(-weight.numel() // LEFT_GRAIN),))
    pointer = ctypes.c_void_p
    function = load_library("adamw").megatrain_adamw
    function.restype = ctypes.c_int64
    return function(
        pointer(weight.data_ptr()),
        pointer(None if residual is None else residual.data_ptr()),
        pointer(grad.data_ptr()),
        pointer(m.data_ptr()),
        pointer(v.data_ptr()),
        ctypes.c_int64(weight.numel()),
        (ctypes.c_float * 13)(*astuple(scalars)),
        ctypes.c_uint32(key),
        pointer(None if left is None else left.data_ptr()),
        ctypes.c_int(residual is not None),
        ctypes.c_int(grad.dtype == torch.bfloat16),
        ctypes.c_int(m.dtype == torch.bfloat16),
        ctypes.c_int(mode),
        ctypes.c_int(threads),
    )


def adamw_reference(
    weight: Tensor,
    residual: Tensor | None,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    scalars: AdamWScalars,
    *,
    key: int = 0,
    mode: Mode = Mode.STEP,
) -> int:
    """`adamw_native` in plain torch, always on all elements."""
    _check(weight, residual, grad, m, v)
    s = AdamWScalars(*torch.tensor(astuple(scalars), dtype=torch.float32).tolist())
    g = grad.float() * s.grad_scale
    w0 = (weight if residual is None else join_master(weight, residual)).clone()
    m0, v0 = m.float(), v.float()
    guarded = g * g > v0 * s.guard + _NEGLIGIBLE
    if mode is Mode.UNDO:
        w1 = (w0 + (m0 * s.step_size) / _denominator(v0, s)) * s.inv_decay
        m1 = (m0 - g * s.one_minus_beta1) * s.inv_beta1
        v1 = ((v0 - (g * g) * s.one_minus_beta2) * s.inv_beta2).clamp(min=0)
        m1, v1 = _rounded_moments(m1, v1, m.dtype, key)
    else:
        m1 = m0 * s.beta1 + g * s.one_minus_beta1
        v1 = v0 * s.beta2 + (g * g) * s.one_minus_beta2
        m1, v1 = _rounded_moments(m1, v1, m.dtype, key)
        w1 = w0 * s.decay - (m1 * s.step_size) / _denominator(v1, s)
    if mode is not Mode.STEP:
        keep = ~guarded if mode is Mode.FINISH else guarded
        w1, m1, v1 = (torch.where(keep, old, new) for old, new in ((w0, w1), (m0, m1), (v0, v1)))
    m.copy_(m1)  # exact: rounded already
    v.copy_(v1)
    if residual is None:
        weight.copy_(w1)
    else:
        split_master(w1, weight, residual)
    return int(guarded.sum())


def _denominator(v: Tensor, s: AdamWScalars) -> Tensor:
    # through fp64: torch's fp32 square root may come from a vector math library that is one bit off
    return v.double().sqrt().float() * s.inv_sqrt_bias2 + s.eps


def _rounded_moments(m: Tensor, v: Tensor, dtype: torch.dtype, key: int) -> tuple[Tensor, Tensor]:
    """The moments as fp32 values that `dtype` holds; for bf16 stochastically rounded."""
    if dtype == torch.float32:
        return m, v
    random = _random_bits((torch.arange(m.numel()) & 0xFFFFFFFF) ^ key)
    return _stochastic_bfloat16(m, random & 0xFFFF), _stochastic_bfloat16(v, random >> 16)


def _stochastic_bfloat16(value: Tensor, random_16: Tensor) -> Tensor:
    """Round to fp32 values that bf16 holds: add 16 random bits (int64) below bf16's last place, cut off the rest."""
    bits = (value.view(torch.int32).long() & 0xFFFFFFFF) + random_16
    return (bits >> 16).to(torch.int16).view(torch.bfloat16).float()


def _random_bits(x: Tensor) -> Tensor:
    """32 mixed bits of each index, in int64; the native op's `random_bits`."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def join_master(weight: Tensor, residual: Tensor) -> Tensor:
    """fp32 master (N,) of a bf16 weight and its int16 residual: bits = (high << 16) + residual."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high + residual.to(torch.int32)).view(torch.float32)


def nearest_bfloat16(values: Tensor) -> Tensor:
    """The bf16 weight a master of these values has, whatever their dtype: nearest, ties away from zero."""
    if values.dtype == torch.bfloat16:
        return values
    bits = values.float().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def split_master(master: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Split an fp32 master into the bf16 weight nearest to it (ties away from zero) and the int16 rest."""
    weight.copy_(nearest_bfloat16(master))
    high = weight.view(torch.int16).to(torch.int32) << 16
    residual.copy_((master.view(torch.int32) - high).to(torch.int16))


def _check(weight: Tensor, residual: Tensor | None, grad: Tensor, m: Tensor, v: Tensor) -> None:
    arrays = [weight, grad, m, v] + ([] if residual is None else [residual])
    assert all(a.device.type == "cpu" and a.is_contiguous() and a.numel() == weight.numel() for a in arrays)
    assert m.dtype == v.dtype and {m.dtype, grad.dtype} <= {torch.bfloat16, torch.float32}
    if residual is None:
        assert weight.dtype == torch.float32
    else:
        assert weight.dtype == torch.bfloat16 and residual.dtype == torch.int16
