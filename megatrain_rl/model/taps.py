"""Weight gradients of linear layers, as their two factors.

A linear layer's weight gradient is grad_out^T x. Autograd would multiply at once, in the layer's dtype, and the caller
would add the product to its sum: another pass over an fp32 buffer of the weight's size for every pack. Under
`LinearTaps` backward hands out the two factors instead, and the caller adds their product to its fp32 sum in the matrix
product itself (`ops.matmul.add_product`).

Shapes: T tokens of a pack, I and O the widths of a linear layer.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, kw_only=True)
class Tap:
    """Two factors of a weight's gradient, which is grad_TO^T input_TI. weight: the weight's name."""

    weight: str
    grad_TO: Tensor
    input_TI: Tensor


class LinearTaps(TorchFunctionMode):
    """While active, `F.linear` by one of `weights` reports to `taps` in backward and gives that weight no gradient.

    A weight used twice is reported twice. Input and bias get their gradients by autograd as always.
    """

    def __init__(self, weights: dict[str, Tensor]):
        super().__init__()
        self._names = {id(weight): name for name, weight in weights.items() if weight.ndim == 2}
        self.taps: list[Tap] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name = self._names.get(id(weight))
        if name is None:
            return F.linear(input, weight, bias)
        return _TappedLinear.apply(input, weight, bias, name, self.taps)


class _TappedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, name, taps):
        ctx.save_for_backward(input, weight)
        ctx.name, ctx.taps, ctx.has_bias = name, taps, bias is not None
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx, grad_out):
        input, weight = ctx.saved_tensors
        grad_TO = grad_out.flatten(0, -2)
        # detached: the input carries the graph, the graph this node, and this node the list
        ctx.taps.append(Tap(weight=ctx.name, grad_TO=grad_TO.detach(), input_TI=input.detach().flatten(0, -2)))
        grad_bias = grad_TO.sum(0) if ctx.has_bias else None
        return grad_out @ weight, None, grad_bias, None, None
