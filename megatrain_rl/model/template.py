"""LayerRunner: meta modules run over views of flat buffers. Nothing is copied to bind a layer's weights.

Shapes: T tokens of a pack, H hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain_rl.batch import PackedBatch
from megatrain_rl.model.attention import Backend
from megatrain_rl.model.decoder import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What every layer needs of a pack besides the hidden states; made once per pack and sweep, on the device.

    cos_sin: rotary tables (1, T, D) each, or None to make them anew in every layer.
    """

    positions_1T: Tensor
    cos_sin: tuple[Tensor, Tensor] | None
    attention: dict[str, Any]  # keyword arguments of `packed_attention`


class LayerRunner:
    """Runs layers of a DecoderSpec on one device.

    compile: one torch.compile graph per structural group, shared by all its layers (weights are inputs of the graph).
    """

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype, backend: Backend, compile: bool):
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._backend = backend
        # inv_freq is a computed buffer, not a parameter: it needs real memory although the rest of the model is meta.
        self._rotary = spec.rotary_class(spec.config).to(device)
        graphs: dict[nn.Module, Any] = {}
        for module in spec.layer_modules:
            if module not in graphs:
                graphs[module] = (
                    torch.compile(_layer_function(module), dynamic=True) if compile else _layer_function(module)
                )
        self._functions = [graphs[m] for m in spec.layer_modules]

    def inputs(self, pack: PackedBatch, *, keep_rotary: bool) -> LayerInputs:
        """keep_rotary: hold the pack's rotary tables; without, its memory is 8 bytes a token."""
        positions_1T = pack.positions_T.to(self._device, non_blocking=True)[None]
        sdpa = self._backend == "sdpa"
        return LayerInputs(
            positions_1T=positions_1T,
            cos_sin=self._cos_sin(positions_1T) if keep_rotary else None,
            attention=dict(
                cu_seqlens=pack.cu_seqlens.to(self._device, non_blocking=True),
                sequence_bounds=tuple(pack.cu_seqlens.tolist()) if sdpa else (),
                max_seqlen=pack.max_seqlen,
                attention_backend=self._backend,
            ),
        )

    def layer(self, index: int, weights: dict[str, Tensor], hidden_TH: Tensor, inputs: LayerInputs) -> Tensor:
        """Output (T, H) of layer `index` on `hidden_TH` with these weights (by their names in the layer's layout)."""
        cos_sin = inputs.cos_sin or self._cos_sin(inputs.positions_1T)
        return self._functions[index](weights, hidden_TH, inputs.positions_1T, cos_sin, inputs.attention)

    def _cos_sin(self, positions_1T: Tensor) -> tuple[Tensor, Tensor]:
        probe = torch.empty((), dtype=self._dtype, device=self._device)  # the module takes dtype and device from it
        return self._rotary(probe, positions_1T)

    def norm(self, weights: dict[str, Tensor], hidden_TH: Tensor) -> Tensor:
        """Final norm; `weights` by their names in the head block ("norm.weight")."""
        own = {name.removeprefix("norm."): w for name, w in weights.items() if name.startswith("norm.")}
        return functional_call(self._spec.norm_module, own, (hidden_TH,))


def _layer_function(module: nn.Module):
    def run(weights, hidden_TH, positions_1T, cos_sin, attention):
        out = functional_call(
            module,
            weights,
            (hidden_TH[None],),
            dict(attention_mask=None, position_ids=positions_1T, position_embeddings=cos_sin, **attention),
        )
        return (out[0] if isinstance(out, tuple) else out)[0]

    return run
