"""DevicePack: one pack as layers and head see it, for the length of a sweep.

Compiled layers see packs padded to a multiple: the padding is one more sequence, of which nothing is predicted and into
which no gradient flows, so it only costs its share of compute.

Where sequences share a prompt, layers see its tokens once, and the hidden state of its last token predicts the first
token of every answer.

Shapes: T tokens of the pack's sequences, C tokens that layers compute, padding included, P predicted tokens, R computed
tokens that predict several.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_rl.batch import PackedBatch
from megatrain_rl.model.template import LayerInputs, LayerRunner, SharedInputs
from megatrain_rl.objectives import TokenStats


@dataclass(frozen=True, kw_only=True)
class DevicePack:
    """tokens_C: ids with padding, on the CPU.
    predict_P: tokens of the pack that are predicted from; targets_P, temperature_P: targets and temperatures of these.
    hidden_P: the computed tokens whose hidden states predict them. The first `num_own` predict one each.
    repeated_R: the computed tokens that predict several; slots_P: for each prediction after num_own its place in them.
    """

    pack: PackedBatch
    tokens_C: Tensor
    layer_inputs: LayerInputs
    predict_P: Tensor
    targets_P: Tensor
    temperature_P: Tensor
    hidden_P: Tensor
    num_own: int
    repeated_R: Tensor
    slots_P: Tensor

    @property
    def num_tokens(self) -> int:
        """The number of tokens that layers compute, padding included."""
        return self.tokens_C.numel()

    @classmethod
    def of(
        cls, pack: PackedBatch, runner: LayerRunner, device: torch.device, *, multiple: int, keep_rotary: bool
    ) -> "DevicePack":
        computed_T = pack.computed_T
        places_T = computed_T.cumsum(0) - 1
        if pack.source_T is not None:
            places_T = places_T[pack.source_T]
        padding = padded_tokens(pack, multiple) - pack.num_computed
        positions_C = torch.cat([pack.positions_T[computed_T], torch.arange(padding)])
        shared = None
        if pack.source_T is not None:
            before_T = torch.cat([torch.zeros(1, dtype=torch.int64), computed_T.cumsum(0)])
            shared = SharedInputs(
                keys_T=torch.cat([places_T, torch.arange(pack.num_computed, pack.num_computed + padding)]),
                cu_queries=_padded_bounds(before_T[pack.cu_seqlens.long()].to(torch.int32), padding),
            )
        predict_P = pack.predict_T.nonzero()[:, 0]
        hidden_P = places_T[predict_P]
        own_P = hidden_P.bincount(minlength=1)[hidden_P] == 1
        order_P = torch.cat([own_P.nonzero()[:, 0], (~own_P).nonzero()[:, 0]])
        predict_P, hidden_P, num_own = predict_P[order_P], hidden_P[order_P], int(own_P.sum())
        repeated_R, slots_P = hidden_P[num_own:].unique(return_inverse=True)
        return cls(
            pack=pack,
            tokens_C=torch.cat([pack.tokens_T[computed_T], pack.tokens_T.new_zeros(padding)]),
            layer_inputs=runner.inputs(
                positions_C,
                _padded_bounds(pack.cu_seqlens, padding),
                max_seqlen=max(pack.max_seqlen, padding),
                keep_rotary=keep_rotary,
                shared=shared,
            ),
            predict_P=predict_P.to(device),
            targets_P=pack.targets_T[predict_P].to(device),
            temperature_P=pack.temperature_T[predict_P].to(device),
            hidden_P=hidden_P.to(device),
            num_own=num_own,
            repeated_R=repeated_R.to(device),
            slots_P=slots_P.to(device),
        )

    def token_stats(self, log_probs_P: Tensor, entropy_P: Tensor | None) -> TokenStats:
        """Values of the predicted tokens among zeros for the others."""
        return TokenStats(
            log_probs_T=self._to_tokens(log_probs_P),
            entropy_T=None if entropy_P is None else self._to_tokens(entropy_P),
        )

    def _to_tokens(self, values_P: Tensor) -> Tensor:
        zeros_T = torch.zeros(self.pack.num_tokens, dtype=torch.float32, device=values_P.device)
        return zeros_T.index_copy_(0, self.predict_P, values_P)

    def leaf_gradient(self, leaf_T: Tensor) -> Tensor:
        """Gradient (P,) of the predicted tokens of a leaf; zeros when the loss did not touch it."""
        grad_T = torch.zeros_like(leaf_T) if leaf_T.grad is None else leaf_T.grad
        return grad_T.index_select(0, self.predict_P).float()


def padded_tokens(pack: PackedBatch, multiple: int) -> int:
    """Tokens of `pack` that layers compute, with padding."""
    return -(-pack.num_computed // multiple) * multiple


def _padded_bounds(bounds: Tensor, padding: int) -> Tensor:
    """Cumulative lengths (S+1,), and those of the padding as one more sequence."""
    return torch.cat([bounds, bounds[-1:] + padding]) if padding else bounds
