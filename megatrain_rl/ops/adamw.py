"""The host AdamW step on one flat range: native op, torch reference, and the split of an fp32 master into 2 + 2 bytes.

Update (Loshchilov & Hutter 2019, algorithm 2, as in `torch.optim.AdamW`), with g the scaled gradient:
    m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2
    w <- w (1 - lr wd) - (lr / (1-b1^t)) m / (sqrt(v) / sqrt(1-b2^t) + eps)
Both versions do these operations in this order in fp32, each rounded once, so they agree to the bit.
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
        return cls(
            b1,
            b2,
            1 - b1,
            1 - b2,
            1 - lr * weight_decay,
            lr / (1 - b1**step),
            1 / math.sqrt(1 - b2**step),
            eps,
            grad_scale,
        )


def adamw_native(
    weight: Tensor, residual: Tensor | None, grad: Tensor, m: Tensor, v: Tensor, scalars: AdamWScalars, threads: int
) -> None:
    """In place on flat CPU tensors (N,): weight bf16 with an int16 residual, or fp32 with None; grad bf16 or fp32; m, v fp32."""
    _check(weight, residual, grad, m, v)
    function = load_library("adamw").megatrain_adamw
    pointer = ctypes.c_void_p
    function(
        pointer(weight.data_ptr()),
        pointer(None if residual is None else residual.data_ptr()),
        pointer(grad.data_ptr()),
        pointer(m.data_ptr()),
        pointer(v.data_ptr()),
        ctypes.c_int64(weight.numel()),
        (ctypes.c_float * 9)(*astuple(scalars)),
        ctypes.c_int(residual is not None),
        ctypes.c_int(grad.dtype == torch.bfloat16),
        ctypes.c_int(threads),
    )


def adamw_reference(
    weight: Tensor, residual: Tensor | None, grad: Tensor, m: Tensor, v: Tensor, scalars: AdamWScalars
) -> None:
    """The same in plain torch."""
    _check(weight, residual, grad, m, v)
    s = AdamWScalars(*torch.tensor(astuple(scalars), dtype=torch.float32).tolist())
    g = grad.float() * s.grad_scale
    m.copy_(m * s.beta1 + g * s.one_minus_beta1)
    v.copy_(v * s.beta2 + (g * g) * s.one_minus_beta2)
    # through fp64: torch's fp32 square root may come from a vector math library that is one bit off
    denominator = v.double().sqrt().float() * s.inv_sqrt_bias2 + s.eps
    master = weight if residual is None else join_master(weight, residual)
    updated = master * s.decay - (m * s.step_size) / denominator
    if residual is None:
        weight.copy_(updated)
    else:
        split_master(updated, weight, residual)


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
    assert m.dtype == v.dtype == torch.float32 and grad.dtype in (torch.bfloat16, torch.float32)
    if residual is None:
        assert weight.dtype == torch.float32
    else:
        assert weight.dtype == torch.bfloat16 and residual.dtype == torch.int16
