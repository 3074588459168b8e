"""LayerRunner: meta modules run over views of flat buffers. Nothing is copied to bind a layer's weights.

Compiled or not, a layer's backward is one function of weights, input and output gradient (`_LayerFunctions._vjp`):
recompute and vector-Jacobian product together. Compiled, it is traced into one graph, so what only the layer's output
needs (its last matrix product) is not recomputed at all.

Shapes: T tokens of a pack that are computed, H hidden size; in `SharedInputs`, T tokens of its sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain_rl.model.attention import Backend
from megatrain_rl.model.decoder import DecoderSpec
from megatrain_rl.model.taps import LinearTaps, Tap
from megatrain_rl.model.traced import TracedVjp, Vjp, mark_shapes
from megatrain_rl.ops.matmul import add_product


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """A pack's inputs to every layer besides the hidden states; made once per pack and sweep, on the device.

    cos_sin: rotary tables (1, T, D) each, or None to make them anew in every layer.
    """

    positions_1T: Tensor
    cos_sin: tuple[Tensor, Tensor] | None
    attention: dict[str, Any]  # keyword arguments of `packed_attention`


@dataclass(frozen=True, kw_only=True)
class SharedInputs:
    """What attention needs beside the rest where sequences may share prompts; see `packed_attention`. On the CPU."""

    keys_T: Tensor
    cu_queries: Tensor

    def attention(self, device: torch.device, *, bounds: bool) -> dict[str, Any]:
        """Keyword arguments of `packed_attention`. bounds: those that only the SDPA path reads, too."""
        return dict(
            keys_T=self.keys_T.to(device, non_blocking=True),
            cu_queries=self.cu_queries.to(device, non_blocking=True),
            query_bounds=tuple(self.cu_queries.tolist()) if bounds else (),
        )


class LayerRunner:
    """Runs layers of a DecoderSpec on one device.

    compile: one graph for forward and one for backward per structural group, shared by all its layers (weights are
    inputs of the graph) and by packs of every size.
    """

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype, backend: Backend, compile: bool):
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._backend = backend
        self._compile = compile
        # inv_freq is a computed buffer, not a parameter: it needs real memory although the rest of the model is meta.
        self._rotary = spec.rotary_class(spec.config).to(device)
        groups: dict[nn.Module, _LayerFunctions] = {}
        for module in spec.layer_modules:
            if module not in groups:
                groups[module] = _LayerFunctions(module, compile)
        self._groups = [groups[m] for m in spec.layer_modules]

    def warm_up(self) -> None:
        """Let the matrix libraries take their workspaces, which they keep, before memory is reserved.

        There is one for this thread and one for autograd's.
        """
        if self._device.type != "cuda":
            return
        square = torch.zeros(64, 64, dtype=self._dtype, device=self._device, requires_grad=True)
        with torch.enable_grad():
            out = torch.nn.functional.linear(torch.mm(square, square), square, square[0])
        torch.autograd.grad(out.sum(), square)

    def inputs(
        self,
        positions_T: Tensor,
        cu_seqlens: Tensor,
        *,
        max_seqlen: int,
        keep_rotary: bool,
        shared: SharedInputs | None = None,
    ) -> LayerInputs:
        """Make a pack's `LayerInputs` on the device.

        positions_T: of the tokens that are computed. cu_seqlens (S+1,): as in `PackedBatch`. Both on the CPU.
        keep_rotary: hold the pack's rotary tables; without, its memory is 8 bytes a token. shared: of a pack whose
        sequences may share prompts.
        """
        positions_1T = positions_T.to(self._device, non_blocking=True)[None]
        sdpa = self._backend == "sdpa"
        return LayerInputs(
            positions_1T=positions_1T,
            cos_sin=self._cos_sin(positions_1T) if keep_rotary else None,
            attention=dict(
                cu_seqlens=cu_seqlens.to(self._device, non_blocking=True),
                sequence_bounds=tuple(cu_seqlens.tolist()) if sdpa else (),
                max_seqlen=max_seqlen,
                attention_backend=self._backend,
                **({} if shared is None else shared.attention(self._device, bounds=sdpa)),
            ),
        )

    def layer(self, index: int, weights: dict[str, Tensor], hidden_TH: Tensor, inputs: LayerInputs) -> Tensor:
        """Output (T, H) of layer `index` on `hidden_TH` with these weights (by their names in the layer's layout)."""
        return self._groups[index].forward(weights, *self._arguments(weights, hidden_TH, inputs))

    def vjp(
        self,
        index: int,
        weights: dict[str, Tensor],
        hidden_TH: Tensor,
        inputs: LayerInputs,
        grad_out_TH: Tensor,
        sums: dict[str, Tensor],
    ) -> Tensor:
        """Returns the gradient (T, H) of the input of layer `index`, given that of its output.

        The weights' gradients are added to `sums` (fp32, shaped, by name).
        """
        arguments = self._arguments(weights, hidden_TH, inputs)
        grad_hidden_TH, taps, others = self._groups[index].vjp(weights, *arguments, grad_out_TH)
        for tap in taps:
            add_product(sums[tap.weight], tap.grad_TO.t(), tap.input_TI)
        for name, grad in others.items():
            sums[name].add_(grad)
        return grad_hidden_TH

    def norm(self, weights: dict[str, Tensor], hidden_TH: Tensor) -> Tensor:
        """Final norm; `weights` by the norm module's own names, as `decoder.norm_weights` gives them."""
        return functional_call(self._spec.norm_module, weights, (hidden_TH,))

    def _arguments(self, weights: dict[str, Tensor], hidden_TH: Tensor, inputs: LayerInputs) -> tuple:
        cos_sin = inputs.cos_sin or self._cos_sin(inputs.positions_1T)
        if self._compile:
            mark_shapes(weights.values(), hidden_TH, inputs.positions_1T, cos_sin, inputs.attention)
        return hidden_TH, inputs.positions_1T, cos_sin, inputs.attention

    def _cos_sin(self, positions_1T: Tensor) -> tuple[Tensor, Tensor]:
        probe = torch.empty((), dtype=self._dtype, device=self._device)  # the module takes dtype and device from it
        return self._rotary(probe, positions_1T)


class _LayerFunctions:
    """forward and vjp of one structural group."""

    def __init__(self, module: nn.Module, compile: bool):
        self._module = module
        self.forward = torch.compile(self._run, dynamic=True) if compile else self._run
        self.vjp: Vjp = TracedVjp(self._vjp) if compile else self._vjp

    def _run(self, weights, hidden_TH, positions_1T, cos_sin, attention) -> Tensor:
        out = functional_call(
            self._module,
            weights,
            (hidden_TH[None],),
            dict(attention_mask=None, position_ids=positions_1T, position_embeddings=cos_sin, **attention),
        )
        return (out[0] if isinstance(out, tuple) else out)[0]

    def _vjp(
        self, weights, hidden_TH, positions_1T, cos_sin, attention, grad_out_TH
    ) -> tuple[Tensor, list[Tap], dict[str, Tensor]]:
        """Gradient of the input, factors of the linear weights' gradients, gradients of everything else by name."""
        hidden_TH = hidden_TH.detach().requires_grad_()
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        with torch.enable_grad(), LinearTaps(leaves) as recorder:
            out_TH = self._run(leaves, hidden_TH, positions_1T, cos_sin, attention)
        grad_hidden_TH, *grads = torch.autograd.grad(
            out_TH, [hidden_TH, *leaves.values()], grad_out_TH, allow_unused=True
        )
        others = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
        return grad_hidden_TH, recorder.taps, others
