"""The host AdamW step on one flat range, and its inverse: native op, torch reference, and the split of an fp32 master into 2 + 2 bytes.

Update (Loshchilov & Hutter 2019, algorithm 2, as in `torch.optim.AdamW`), with g the scaled gradient:
    m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2
    w <- w (1 - lr wd) - (lr / (1-b1^t)) m / (sqrt(v) / sqrt(1-b2^t) + eps)
The inverse solves these for the old w, m, v given the new ones and g. Native and reference do the same operations in the same order
in fp32, each rounded once, so they agree to the bit. Moments in bf16 are rounded stochastically (an update smaller than half a unit in
the last place still counts in the mean); the random bits depend on `key` and the element's index alone.
"""

import ctypes
import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from megatrain_rl.ops.build import load_library


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
    ) -> "AdamWScalars":
        """step: 1 for the first update. grad_scale: factor on the gradients (clipping)."""
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
            # a factor of 0 has no inverse, and what it wiped out is never read again
            1 / b1 if b1 else 0.0,
            1 / b2 if b2 else 0.0,
            1 / decay if decay else 0.0,
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
    undo: bool = False,
) -> None:
    """In place on flat CPU tensors (N,): weight bf16 with an int16 residual, or fp32 with None; grad, and m with v, bf16 or fp32.

    key: 32 bits that choose the random bits of bf16 moments. undo: take back the step with the same scalars.
    """
    _check(weight, residual, grad, m, v)
    pointer = ctypes.c_void_p
    load_library("adamw").megatrain_adamw(
        pointer(weight.data_ptr()),
        pointer(None if residual is None else residual.data_ptr()),
        pointer(grad.data_ptr()),
        pointer(m.data_ptr()),
        pointer(v.data_ptr()),
        ctypes.c_int64(weight.numel()),
        (ctypes.c_float * 12)(*astuple(scalars)),
        ctypes.c_uint32(key),
        ctypes.c_int(residual is not None),
        ctypes.c_int(grad.dtype == torch.bfloat16),
        ctypes.c_int(m.dtype == torch.bfloat16),
        ctypes.c_int(undo),
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
    undo: bool = False,
) -> None:
    """The same in plain torch."""
    _check(weight, residual, grad, m, v)
    s = AdamWScalars(*torch.tensor(astuple(scalars), dtype=torch.float32).tolist())
    g = grad.float() * s.grad_scale
    master = weight if residual is None else join_master(weight, residual)
    m1, v1 = m.float(), v.float()
    if not undo:
        m1 = m1 * s.beta1 + g * s.one_minus_beta1
        v1 = v1 * s.beta2 + (g * g) * s.one_minus_beta2
    # through fp64: torch's fp32 square root may come from a vector math library that is one bit off
    denominator = v1.double().sqrt().float() * s.inv_sqrt_bias2 + s.eps
    if undo:
        updated = (master + (m1 * s.step_size) / denominator) * s.inv_decay
        m1 = (m1 - g * s.one_minus_beta1) * s.inv_beta1
        v1 = ((v1 - (g * g) * s.one_minus_beta2) * s.inv_beta2).clamp(min=0)
    else:
        updated = master * s.decay - (m1 * s.step_size) / denominator
    _store_moments(m, v, m1, v1, key)
    if residual is None:
        weight.copy_(updated)
    else:
        split_master(updated, weight, residual)


def _store_moments(m: Tensor, v: Tensor, m1: Tensor, v1: Tensor, key: int) -> None:
    if m.dtype == torch.float32:
        m.copy_(m1)
        v.copy_(v1)
        return
    random = _random_bits((torch.arange(m.numel()) & 0xFFFFFFFF) ^ key)
    for place, value, bits in ((m, m1, random & 0xFFFF), (v, v1, random >> 16)):
        whole = (value.view(torch.int32).long() & 0xFFFFFFFF) + bits
        place.copy_((whole >> 16).to(torch.int16).view(torch.bfloat16))


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
