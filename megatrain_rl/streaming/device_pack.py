"""DevicePack: the indices of one pack on the device, for the length of a sweep.

Shapes: T tokens of the pack, P predicted tokens of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_rl.batch import PackedBatch
from megatrain_rl.model.template import LayerInputs
from megatrain_rl.objectives import TokenStats


@dataclass(frozen=True, kw_only=True)
class DevicePack:
    """predict_P: rows of the pack that are predicted; targets_P, temperature_P: theirs."""

    pack: PackedBatch
    layer_inputs: LayerInputs
    predict_P: Tensor
    targets_P: Tensor
    temperature_P: Tensor

    @classmethod
    def of(cls, pack: PackedBatch, layer_inputs: LayerInputs, device: torch.device) -> "DevicePack":
        rows_P = pack.predict_T.nonzero()[:, 0]
        return cls(
            pack=pack,
            layer_inputs=layer_inputs,
            predict_P=rows_P.to(device),
            targets_P=pack.targets_T[rows_P].to(device),
            temperature_P=pack.temperature_T[rows_P].to(device),
        )

    def token_stats(self, log_probs_P: Tensor, entropy_P: Tensor | None) -> TokenStats:
        """Values of the predicted rows among zeros for the others."""
        return TokenStats(
            log_probs_T=self._to_tokens(log_probs_P),
            entropy_T=None if entropy_P is None else self._to_tokens(entropy_P),
        )

    def _to_tokens(self, values_P: Tensor) -> Tensor:
        zeros_T = torch.zeros(self.pack.num_tokens, dtype=torch.float32, device=values_P.device)
        return zeros_T.index_copy_(0, self.predict_P, values_P)

    def leaf_gradient(self, leaf_T: Tensor) -> Tensor:
        """Gradient (P,) of the predicted rows of a leaf; zeros when the loss did not touch it."""
        grad_T = torch.zeros_like(leaf_T) if leaf_T.grad is None else leaf_T.grad
        return grad_T.index_select(0, self.predict_P).float()
