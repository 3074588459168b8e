"""HeadPass: final norm, output matrix and objective of one sweep, pack by pack.

Its weights (and, in training, the fp32 gradient sums) are on the device for as long as the object lives, so whoever
makes one lets go of it before the layers' backward. Made and called by the executor.

Shapes: T tokens of a pack that layers compute, P predicted tokens of it, C tokens of a chunk of them, R tokens that
predict several (the last of a shared prompt), H hidden size, V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain_rl.head import Head, HeadStats, chunks
from megatrain_rl.host.store import WeightStore
from megatrain_rl.model.decoder import Block, DecoderSpec, norm_weights
from megatrain_rl.model.template import LayerRunner
from megatrain_rl.objectives import Objective, TokenStats, checked
from megatrain_rl.planner import MemoryPlan
from megatrain_rl.streaming.device_pack import DevicePack
from megatrain_rl.streaming.embedding import add_rows
from megatrain_rl.streaming.hidden import HiddenStates
from megatrain_rl.transfer.lanes import Lanes, Mark
from megatrain_rl.transfer.weight_ring import upload


@dataclass(frozen=True, kw_only=True)
class ForwardBackwardOutput:
    """What a sweep, or several, gave for each pack: loss, the objective's metrics, statistics on the CPU.

    nonfinite_loss: some loss was not finite, so backward was not started and no gradient was added.
    """

    losses: list[float]
    metrics: list[dict[str, Any]]
    stats: list[TokenStats]
    nonfinite_loss: bool

    @classmethod
    def joined(cls, sweeps: Iterable["ForwardBackwardOutput"]) -> "ForwardBackwardOutput":
        """The results of consecutive sweeps as one."""
        sweeps = list(sweeps)
        return cls(
            losses=[loss for sweep in sweeps for loss in sweep.losses],
            metrics=[metrics for sweep in sweeps for metrics in sweep.metrics],
            stats=[stats for sweep in sweeps for stats in sweep.stats],
            nonfinite_loss=any(sweep.nonfinite_loss for sweep in sweeps),
        )


def head_blocks(spec: DecoderSpec) -> tuple[Block, ...]:
    """The blocks the head reads: its own, and the embedding when the output matrix is tied to it."""
    return (spec.head, spec.embed) if spec.tied else (spec.head,)


@dataclass(frozen=True)
class HeadWeights:
    """flats: flat device weights by block name.
    ready: recorded on upload after the last copy; waited for by compute before the head runs.
    """

    flats: dict[str, Tensor]
    ready: Mark

    @classmethod
    def upload(
        cls, lanes: Lanes, store: WeightStore, blocks: Sequence[Block], dtype: torch.dtype, device: torch.device
    ) -> "HeadWeights":
        """Start `blocks` on their way; they are on the device only while the caller holds them."""
        flats = {}
        for block in blocks:
            flat = torch.empty(block.layout.numel, dtype=dtype, device=device)
            # the memory may have had other users on compute, which must be done before upload writes it
            ready = upload(lanes, store, block, flat, after=lanes.compute.record())
            flats[block.name] = flat
        return cls(flats, ready)


@dataclass(frozen=True, kw_only=True)
class HeadResult:
    """What the head gave for one pack. loss: scalar. grad_TH: gradient (T, H) of the last hidden states."""

    loss: Tensor
    metrics: dict[str, Any]
    stats: TokenStats
    grad_TH: Tensor


class HeadPass:
    """flats, sums: flat weights and fp32 gradient sums by name of the head's blocks; sums None for forward only."""

    def __init__(
        self,
        spec: DecoderSpec,
        runner: LayerRunner,
        head: Head,
        plan: MemoryPlan,
        flats: dict[str, Tensor],
        sums: dict[str, Tensor] | None,
    ):
        self._runner = runner
        self._head = head
        self._plan = plan
        output_block, output_name = spec.output_weight
        self._norm_weights = norm_weights(spec.head.layout.views(flats[spec.head.name]))
        self._weight_VH = output_block.layout.view(flats[output_block.name], output_name)
        if sums is not None:
            self._norm_sums = norm_weights(spec.head.layout.views(sums[spec.head.name]))
            self._weight_sum_VH = output_block.layout.view(sums[output_block.name], output_name)

    def stats(self, hidden_TH: Tensor, dp: DevicePack, *, entropy: bool) -> TokenStats:
        """Log-probs, and entropies when asked for, of the last hidden states (T, H) of a pack."""
        return self._leaves(self._forward(hidden_TH, dp, entropy), dp)

    def run(
        self, packs: list[DevicePack], hidden: HiddenStates, objective: Objective, *, entropy: bool
    ) -> ForwardBackwardOutput:
        """Head and objective of every pack; leaves each pack's gradient in `hidden`."""
        losses, metrics, stats = [], [], []
        for m, dp in enumerate(packs):
            result = self.forward_backward(hidden.take_final(m), dp, objective, entropy=entropy)
            hidden.give_gradient(m, result.grad_TH)
            losses.append(result.loss)
            metrics.append(result.metrics)
            stats.append(result.stats)
        values = torch.stack(losses).tolist()
        return ForwardBackwardOutput(
            losses=values,
            metrics=metrics,
            stats=[each.cpu() for each in stats],
            nonfinite_loss=not all(math.isfinite(value) for value in values),
        )

    def forward_backward(self, hidden_TH: Tensor, dp: DevicePack, objective: Objective, *, entropy: bool) -> HeadResult:
        """`stats`, the objective, and the way back to the hidden states; weights' gradients are added to the sums."""
        head_stats = self._forward(hidden_TH, dp, entropy)
        stats = self._leaves(head_stats, dp)
        stats.log_probs_T.requires_grad_()
        if stats.entropy_T is not None:
            stats.entropy_T.requires_grad_()
        with torch.enable_grad():
            out = checked(objective(stats, dp.pack))
            if out.loss.requires_grad:
                out.loss.backward()
        return HeadResult(
            loss=out.loss.detach().float(),
            metrics=out.metrics,
            stats=stats.detach(),
            grad_TH=self._backward(hidden_TH, head_stats, stats, dp),
        )

    def _leaves(self, head_stats: HeadStats, dp: DevicePack) -> TokenStats:
        return dp.token_stats(head_stats.log_probs_P, head_stats.entropy_P)

    def _forward(self, hidden_TH: Tensor, dp: DevicePack, entropy: bool) -> HeadStats:
        """Chunk by chunk, the norm too: beside the hidden states nothing of the pack's size exists."""
        parts = [
            self._head.forward(
                self._runner.norm(self._norm_weights, hidden_TH.index_select(0, dp.hidden_P[c])),
                self._weight_VH,
                dp.targets_P[c],
                dp.temperature_P[c],
                entropy=entropy,
            )
            for c in self._chunks(dp)
        ]
        return HeadStats.concatenated(parts, entropy=entropy, device=hidden_TH.device)

    def _backward(self, hidden_TH: Tensor, head_stats: HeadStats, stats: TokenStats, dp: DevicePack) -> Tensor:
        """Gradient (T, H) of the hidden states. stats: the leaves with the objective's gradients."""
        grad_TH = torch.zeros_like(hidden_TH)
        # of tokens that predict several: summed in fp32
        grad_RH = torch.zeros(dp.repeated_R.numel(), hidden_TH.shape[1], dtype=torch.float32, device=hidden_TH.device)
        grad_log_probs_P = dp.leaf_gradient(stats.log_probs_T)
        # an entropy that the loss does not use needs no second term in the head's backward
        grad_entropy_P = None
        if stats.entropy_T is not None and stats.entropy_T.grad is not None:
            grad_entropy_P = dp.leaf_gradient(stats.entropy_T)
        for c in self._chunks(dp):
            hidden_CH = hidden_TH.index_select(0, dp.hidden_P[c]).requires_grad_()
            norm_leaves = {name: w.detach().requires_grad_() for name, w in self._norm_weights.items()}
            with torch.enable_grad():
                normed_CH = self._runner.norm(norm_leaves, hidden_CH)
            grad_normed_CH = self._head.backward(
                normed_CH.detach(),
                self._weight_VH,
                dp.targets_P[c],
                dp.temperature_P[c],
                head_stats[c],
                grad_log_probs_P[c],
                None if grad_entropy_P is None else grad_entropy_P[c],
                self._weight_sum_VH,
            )
            grad_CH, *grads = torch.autograd.grad(normed_CH, [hidden_CH, *norm_leaves.values()], grad_normed_CH)
            for name, grad in zip(norm_leaves, grads, strict=True):
                self._norm_sums[name].add_(grad)
            num_own = max(0, min(c.stop, dp.num_own) - c.start)
            grad_TH.index_copy_(0, dp.hidden_P[c][:num_own], grad_CH[:num_own])
            if num_own < len(grad_CH):
                slots = dp.slots_P[c.start + num_own - dp.num_own : c.stop - dp.num_own]
                add_rows(grad_RH, slots, grad_CH[num_own:].float())
        return grad_TH.index_copy_(0, dp.repeated_R, grad_RH.to(grad_TH.dtype))

    def _chunks(self, dp: DevicePack) -> list[slice]:
        return chunks(dp.predict_P.numel(), self._plan.head_chunk(dp.num_tokens))
