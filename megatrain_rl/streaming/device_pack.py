"""DevicePack: one pack as layers and head see it, for the length of a sweep.

Compiled layers see packs padded to a multiple: the padding is one more sequence, of which nothing is predicted and into
which no gradient flows, so it only costs its share of compute.

Shapes: T tokens of the pack, P predicted tokens of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_rl.batch import PackedBatch
from megatrain_rl.model.template import LayerInputs, LayerRunner
from megatrain_rl.objectives import TokenStats


@dataclass(frozen=True, kw_only=True)
class DevicePack:
    """tokens_T: ids with padding, on the CPU.
    predict_P: rows of the pack that are predicted; targets_P, temperature_P: targets and temperatures of these rows.
    """

    pack: PackedBatch
    tokens_T: Tensor
    layer_inputs: LayerInputs
    predict_P: Tensor
    targets_P: Tensor
    temperature_P: Tensor

    @property
    def num_tokens(self) -> int:
        """The number of tokens, padding included."""
        return self.tokens_T.numel()

    @classmethod
    def of(
        cls, pack: PackedBatch, runner: LayerRunner, device: torch.device, *, multiple: int, keep_rotary: bool
    ) -> "DevicePack":
        rows_P = pack.predict_T.nonzero()[:, 0]
        padding = padded_tokens(pack, multiple) - pack.num_tokens
        tokens_T, positions_T, cu_seqlens = pack.tokens_T, pack.positions_T, pack.cu_seqlens
        if padding:
            tokens_T = torch.cat([tokens_T, tokens_T.new_zeros(padding)])
            positions_T = torch.cat([positions_T, torch.arange(padding)])
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + padding])
        return cls(
            pack=pack,
            tokens_T=tokens_T,
            layer_inputs=runner.inputs(
                positions_T, cu_seqlens, max_seqlen=max(pack.max_seqlen, padding), keep_rotary=keep_rotary
            ),
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


def padded_tokens(pack: PackedBatch, multiple: int) -> int:
    return -(-pack.num_tokens // multiple) * multiple
