"""TracedVjp: a layer's vector-Jacobian product as one compiled graph.

torch.compile cuts at `autograd.grad`, and its own backward graphs keep the whole forward. Tracing the function with
`make_fx` first gives one graph of plain operations; what no result needs is dropped from it, and torch.compile makes
kernels of the rest.

Shapes: T tokens of a pack, S sequences in it. T, S and the longest sequence's length are symbolic: packs of every size
share a graph. Packs whose sequences may share prompts have one more, in which the keys' number is symbolic too.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from megatrain_rl.model.taps import Tap

Vjp = Callable[..., tuple[Tensor, list[Tap], dict[str, Tensor]]]

# Tensors among the keyword arguments of `packed_attention`, as far as a pack has them.
_ATTENTION_TENSORS = ("cu_seqlens", "cu_queries", "keys_T")


def mark_shapes(
    weights: Iterable[Tensor],
    hidden_TH: Tensor,
    positions_1T: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    attention: dict[str, Any],
) -> None:
    """Tell torch.compile that only tokens and sequences vary. All else is fixed: kernels know widths and strides.

    attention: keyword arguments of `packed_attention`.
    """
    for weight in weights:
        torch._dynamo.mark_static(weight)
    torch._dynamo.mark_static(hidden_TH, 1)
    torch._dynamo.mark_static(positions_1T, 0)
    for table in cos_sin:
        torch._dynamo.mark_static(table, 0)
        torch._dynamo.mark_static(table, 2)
    varying = [(hidden_TH, 0), (positions_1T, 1), (cos_sin[0], 1), (cos_sin[1], 1)]
    varying += [(attention[name], 0) for name in _attention_tensors(attention)]
    for tensor, dim in varying:
        torch._dynamo.mark_dynamic(tensor, dim)


def _attention_tensors(attention: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in _ATTENTION_TENSORS if name in attention)


class TracedVjp:
    """A function with the arguments and results of `vjp`, a `_LayerFunctions._vjp`. Traced at the first call."""

    def __init__(self, vjp: Vjp):
        self._vjp = vjp
        self._graphs: dict[tuple[str, ...], Callable[..., list[Tensor]]] = {}  # by the tensors that attention has
        self._taps: list[str] = []
        self._others: list[str] = []

    def __call__(
        self,
        weights: dict[str, Tensor],
        hidden_TH: Tensor,
        positions_1T: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: dict[str, Any],
        grad_out_TH: Tensor,
    ) -> tuple[Tensor, list[Tap], dict[str, Tensor]]:
        torch._dynamo.mark_static(grad_out_TH, 1)
        torch._dynamo.mark_dynamic(grad_out_TH, 0)
        names = _attention_tensors(attention)
        tensors = (*weights.values(), hidden_TH, positions_1T, *cos_sin, grad_out_TH, *(attention[n] for n in names))
        if names not in self._graphs:
            self._graphs[names] = self._trace(list(weights), attention, tensors)
        grad_hidden_TH, *rest = self._graphs[names](*tensors, attention["max_seqlen"])
        factors, others = rest[: 2 * len(self._taps)], rest[2 * len(self._taps) :]
        taps = [
            Tap(weight=name, grad_TO=factors[2 * i], input_TI=factors[2 * i + 1]) for i, name in enumerate(self._taps)
        ]
        return grad_hidden_TH, taps, dict(zip(self._others, others, strict=True))

    def _trace(
        self, names: list[str], attention: dict[str, Any], tensors: tuple[Tensor, ...]
    ) -> Callable[..., list[Tensor]]:
        def flat(*arguments):
            *values, longest = arguments
            weights = dict(zip(names, values, strict=False))
            hidden_TH, positions_1T, cos, sin, grad_out_TH, *of_attention = values[len(names) :]
            varying = dict(zip(_attention_tensors(attention), of_attention, strict=True), max_seqlen=longest)
            varying = attention | varying
            grad_hidden_TH, taps, others = self._vjp(weights, hidden_TH, positions_1T, (cos, sin), varying, grad_out_TH)
            self._taps, self._others = [tap.weight for tap in taps], list(others)
            factors = [factor for tap in taps for factor in (tap.grad_TO, tap.input_TI)]
            return [grad_hidden_TH, *factors, *others.values()]

        examples, longest = _examples(tensors, len(names))
        # one thread: the tracer does not follow autograd to the device's own
        with torch.autograd.set_multithreading_enabled(False):
            graph = make_fx(flat, tracing_mode="symbolic")(*examples, longest)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return torch.compile(graph, dynamic=True)


def _examples(tensors: tuple[Tensor, ...], num_weights: int) -> tuple[list[Tensor], int]:
    """Stand-ins to trace with, of which only the shapes are looked at.

    The tracer gives equal sizes one symbol, so the numbers of tokens, keys and sequences must not happen to equal a
    width, or each other.
    """
    weights, (hidden_TH, positions_1T, cos, sin, grad_out_TH, *of_attention) = (
        tensors[:num_weights],
        tensors[num_weights:],
    )
    taken = {size for weight in weights for size in weight.shape} | {cos.shape[2]}
    free = [n for n in (509, 251, 127, 113, 109, 107, 103, 101, 97, 89) if n not in taken]
    tokens, bounds, longest, keys = free[:4]
    # int32 bounds of sequences; int64 places of keys
    sizes = [bounds if tensor.dtype == torch.int32 else keys for tensor in of_attention]
    return [
        *weights,
        hidden_TH.new_empty(tokens, hidden_TH.shape[1]),
        positions_1T.new_empty(1, tokens),
        *(table.new_empty(1, tokens, table.shape[2]) for table in (cos, sin)),
        grad_out_TH.new_empty(tokens, grad_out_TH.shape[1]),
        *(tensor.new_empty(size) for tensor, size in zip(of_attention, sizes, strict=True)),
    ], longest
