"""Matrix products whose result is fp32 although the factors are bf16.

On CUDA the product itself accumulates and returns fp32 (`out_dtype`). On a CPU torch has no such product: it returns
the factors' dtype and the sum is taken in fp32, so bf16 on a CPU rounds once more. With fp32 factors both are the plain
product.
"""

import torch
from torch import Tensor


def mm_fp32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """fp32 (M, N) product."""
    if a_MK.is_cuda and a_MK.dtype == torch.bfloat16:
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    return (a_MK @ b_KN).float()


def add_product(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """total += a b, in place on an fp32 (M, N) sum."""
    if a_MK.is_cuda and a_MK.dtype == torch.bfloat16:
        torch.addmm(total_MN, a_MK, b_KN, out_dtype=torch.float32, out=total_MN)
    elif a_MK.dtype == torch.float32:
        total_MN.addmm_(a_MK, b_KN)
    else:
        total_MN.add_(a_MK @ b_KN)
