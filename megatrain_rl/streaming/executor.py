"""StreamExecutor: runs a sweep. Layers outside, packs inside; one layer's weights on the device at a time.

The order comes from LayerSchedule, transfers from the ring, the slabs and the activation store; what is here is the arithmetic
between them. The caller (StreamTrainer) chooses the store: handing it the frozen one gives reference log-probs.

Shapes: T tokens of a pack, H hidden size, V vocabulary.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain_rl.batch import PackedBatch
from megatrain_rl.config import StreamConfig
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.host.store import WeightStore
from megatrain_rl.model.attention import resolve_backend
from megatrain_rl.model.decoder import EMBED_WEIGHT, Block, DecoderSpec
from megatrain_rl.model.template import LayerRunner
from megatrain_rl.objectives import Objective, TokenStats
from megatrain_rl.planner import MemoryPlan
from megatrain_rl.streaming.device_pack import DevicePack
from megatrain_rl.streaming.head_pass import HeadPass
from megatrain_rl.streaming.hidden import HiddenStates
from megatrain_rl.streaming.schedule import Kind, LayerSchedule, Visit
from megatrain_rl.transfer.activations import ActivationStore
from megatrain_rl.transfer.grad_slabs import GradSlabPool
from megatrain_rl.transfer.lanes import Lanes
from megatrain_rl.transfer.weight_ring import WeightRing, upload

# Rotary tables of the first packs of a sweep are kept on the device, those of later ones made anew in every layer: what is kept
# must not grow with the batch.
_ROTARY_TOKENS = 65536


@dataclass(frozen=True, kw_only=True)
class ForwardBackwardOutput:
    """Per pack: loss, metrics as the objective gave them, statistics on the CPU. nonfinite_loss: some loss was not finite, so
    backward was not started and no gradient was added."""

    losses: list[float]
    metrics: list[dict[str, Any]]
    stats: list[TokenStats]
    nonfinite_loss: bool


def _on_compute_lane(sweep):
    """Kernels of a sweep go to the lane that the transfers' marks refer to, whatever stream the caller is on."""

    @functools.wraps(sweep)
    def run(self, *args, **kwargs):
        with self._lanes.compute:
            return sweep(self, *args, **kwargs)

    return run


class StreamExecutor:
    """Allocates the ring at once and, in `enable_training`, what gradients need. One caller at a time."""

    def __init__(self, spec: DecoderSpec, config: StreamConfig, plan: MemoryPlan, device: torch.device):
        dtype = config.param_torch_dtype
        backend = resolve_backend(config.attention, device, dtype)  # first: it may refuse the setting
        pin = device.type == "cuda"
        if pin:
            _cap_gpu_memory(device, plan.gpu_cap_bytes)
        self._spec = spec
        self._plan = plan
        self._device = device
        self._dtype = dtype
        self._interval = config.checkpoint_interval
        self._lanes = Lanes.on(device)
        self._runner = LayerRunner(spec, device, dtype, backend, config.compile and device.type == "cuda")
        self._ring = WeightRing(self._lanes, device, config.ring_depth, spec.max_layer_numel, dtype)
        self._activations = ActivationStore(self._lanes, device, spec.hidden_size, dtype, pin=pin)
        self._slab_settings = dict(
            num_slabs=config.num_grad_slabs, slab_numel=plan.slab_numel, dtype=config.grad_torch_dtype
        )
        self._slabs: GradSlabPool | None = None
        self._gradients: HostGradients | None = None
        self._sum: Tensor | None = None
        self.grad_norms: dict[str, Tensor] = {}

    def enable_training(self, gradients: HostGradients) -> None:
        """Allocate what only training needs; gradients will land in `gradients`."""
        self._gradients = gradients
        self._sum = torch.zeros(self._spec.max_layer_numel, dtype=torch.float32, device=self._device)
        self._slabs = GradSlabPool(
            self._lanes, self._device, on_landed=lambda block: gradients.filled.add(block.name), **self._slab_settings
        )

    @torch.no_grad()
    @_on_compute_lane
    def log_probs(self, packs: Sequence[PackedBatch], store: WeightStore, *, entropy: bool) -> list[TokenStats]:
        """Statistics of `packs` under the weights of `store`, on the CPU."""
        schedule = LayerSchedule(self._spec.num_layers, self._interval, train=False)
        device_packs, hidden = self._begin(packs, store, schedule)
        self._run_visits(schedule, range(len(schedule.visits)), device_packs, hidden)
        head = HeadPass(self._spec, self._runner, self._plan, self._head_flats(store), sums=None)
        stats = [head.stats(hidden.take_final(m), dp, entropy=entropy) for m, dp in enumerate(device_packs)]
        return [_on_cpu(s) for s in stats]

    @torch.no_grad()
    @_on_compute_lane
    def forward_backward(
        self, packs: Sequence[PackedBatch], store: WeightStore, objective: Objective, *, entropy: bool
    ) -> ForwardBackwardOutput:
        """One sweep of forward and backward; gradients are added to what HostGradients holds and land asynchronously."""
        assert self._slabs is not None, "forward-only executor"
        self._slabs.drain()
        schedule = LayerSchedule(self._spec.num_layers, self._interval, train=True)
        device_packs, hidden = self._begin(packs, store, schedule)
        self._run_visits(schedule, range(schedule.num_forward), device_packs, hidden)
        result, sums = self._head_pass(device_packs, store, objective, hidden, entropy)
        if not result.nonfinite_loss:
            while sums:  # no name may keep a pushed sum alive: it is as large as the output matrix
                self._push(*sums.pop())
            self._run_visits(schedule, range(schedule.num_forward, len(schedule.visits)), device_packs, hidden)
            self._embedding_gradient(device_packs, hidden)
        return result

    def drain(self) -> None:
        """Until every gradient has landed; raises what went wrong on the way."""
        if self._slabs is not None:
            self._slabs.drain()

    def close(self) -> None:
        if self._slabs is not None:
            self._slabs.close()
        self._activations.close()
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    # ---- the sweep's parts ----

    def _begin(
        self, packs: Sequence[PackedBatch], store: WeightStore, schedule: LayerSchedule
    ) -> tuple[list[DevicePack], HiddenStates]:
        self._activations.begin(schedule.num_slots, [p.num_tokens for p in packs])
        hidden = HiddenStates(self._activations, schedule, packs, self._plan.resident_bytes)
        for m, pack in enumerate(packs):
            store.rows(self._spec.embed, EMBED_WEIGHT, pack.tokens_T, self._activations.host_TH(0, m))
            self._activations.filled(0, m)
        self._ring.begin(store, [self._spec.layers[v.layer] for v in schedule.visits])
        before = 0
        device_packs = []
        for pack in packs:
            before += pack.num_tokens
            layer_inputs = self._runner.inputs(pack, keep_rotary=before <= _ROTARY_TOKENS)
            device_packs.append(DevicePack.of(pack, layer_inputs, self._device))
        return device_packs, hidden

    def _run_visits(self, schedule: LayerSchedule, which: range, packs: list[DevicePack], hidden: HiddenStates) -> None:
        for v in which:
            visit = schedule.visits[v]
            block = self._spec.layers[visit.layer]
            hidden.prefetch(visit, 0)
            weights = block.layout.views(self._ring.acquire(block))
            if visit.kind is Kind.BACKWARD:
                weights = {name: w.detach().requires_grad_() for name, w in weights.items()}
                total = self._zero_or_pull(block, self._sum[: block.layout.numel])
                total_views = block.layout.views(total)
            for m, dp in enumerate(packs):
                # one pack ahead; the last pack looks into the next visit
                if m + 1 < len(packs):
                    hidden.prefetch(visit, m + 1)
                elif v + 1 in which:
                    hidden.prefetch(schedule.visits[v + 1], 0)
                if visit.kind is Kind.BACKWARD:
                    self._layer_backward(visit, m, dp, weights, total_views, hidden)
                else:
                    hidden_TH = hidden.take_input(visit, m)
                    hidden.give_output(visit, m, self._runner.layer(visit.layer, weights, hidden_TH, dp.layer_inputs))
            self._ring.release(block)
            if visit.kind is Kind.BACKWARD:
                self._push(block, total)

    def _layer_backward(
        self,
        visit: Visit,
        m: int,
        dp: DevicePack,
        weights: dict[str, Tensor],
        total_views: dict[str, Tensor],
        hidden: HiddenStates,
    ) -> None:
        """Recompute one layer on one pack, then its vector-Jacobian product."""
        hidden_TH = hidden.take_input(visit, m).requires_grad_()
        with torch.enable_grad():
            out_TH = self._runner.layer(visit.layer, weights, hidden_TH, dp.layer_inputs)
        grad_hidden_TH, *grads = torch.autograd.grad(
            out_TH, [hidden_TH, *weights.values()], hidden.take_gradient(m), allow_unused=True
        )
        for name, grad in zip(weights, grads, strict=True):
            if grad is not None:
                total_views[name].add_(grad)
        hidden.give_gradient(m, grad_hidden_TH)

    def _head_flats(self, store: WeightStore) -> dict[str, Tensor]:
        """Flat weights of the head's blocks; they are on the device only while the caller holds them."""
        flats = {}
        for block in self._head_blocks():
            flat = torch.empty(block.layout.numel, dtype=self._dtype, device=self._device)
            # the memory may have had other users on compute, which must be done before upload writes it
            self._lanes.compute.wait(upload(self._lanes, store, block, flat, after=self._lanes.compute.record()))
            flats[block.name] = flat
        return flats

    def _head_pass(
        self, packs: list[DevicePack], store: WeightStore, objective: Objective, hidden: HiddenStates, entropy: bool
    ) -> tuple[ForwardBackwardOutput, list[tuple[Block, Tensor]]]:
        """Head and objective of every pack; leaves each pack's gradient in `hidden`. Returns the gradient sums of the head's blocks,
        not pushed yet: a non-finite loss must not touch the gradients on the host."""
        sums = {block.name: self._new_sum(block) for block in self._head_blocks()}
        head = HeadPass(self._spec, self._runner, self._plan, self._head_flats(store), sums)
        results = []
        for m, dp in enumerate(packs):
            result = head.forward_backward(hidden.take_final(m), dp, objective, entropy=entropy)
            hidden.give_gradient(m, result.grad_TH)
            results.append((result.loss, result.metrics, result.stats))  # and not the gradient: it would be kept alive
        losses = torch.stack([loss for loss, _, _ in results]).tolist()
        output = ForwardBackwardOutput(
            losses=losses,
            metrics=[metrics for _, metrics, _ in results],
            stats=[_on_cpu(stats) for _, _, stats in results],
            nonfinite_loss=not all(math.isfinite(x) for x in losses),
        )
        return output, [(block, sums[block.name]) for block in self._head_blocks()]

    def _embedding_gradient(self, packs: list[DevicePack], hidden: HiddenStates) -> None:
        block = self._spec.embed
        # A tied matrix has just had the head's gradient pushed: it comes back and is added to.
        self._slabs.drain()
        total = self._new_sum(block)
        total_VH = block.layout.view(total, EMBED_WEIGHT)
        for m, dp in enumerate(packs):
            tokens_T, grad_TH = dp.pack.tokens_T, hidden.take_gradient(m).float()
            if self._spec.padding_idx is not None:
                rows = (tokens_T != self._spec.padding_idx).nonzero()[:, 0]
                tokens_T, grad_TH = tokens_T[rows], grad_TH.index_select(0, rows.to(self._device))
            _add_rows(total_VH, tokens_T.to(self._device), grad_TH)
        self._push(block, total)

    def _head_blocks(self) -> tuple[Block, ...]:
        """The blocks the head reads: its own, and the embedding when the output matrix is tied to it."""
        return (self._spec.head, self._spec.embed) if self._spec.tied else (self._spec.head,)

    def _new_sum(self, block: Block) -> Tensor:
        return self._zero_or_pull(block, torch.empty(block.layout.numel, dtype=torch.float32, device=self._device))

    def _zero_or_pull(self, block: Block, flat: Tensor) -> Tensor:
        """Start a block's fp32 sum: with the gradient of earlier sweeps when there is one, else with zeros."""
        if block.name in self._gradients.filled:
            self._slabs.pull(self._gradients.flat(block), flat)
        else:
            flat.zero_()
        return flat

    def _push(self, block: Block, total: Tensor) -> None:
        self.grad_norms[block.name] = torch.linalg.vector_norm(total)
        self._slabs.push(block, total, self._gradients.flat(block))


def _add_rows(total_VH: Tensor, tokens_T: Tensor, grad_TH: Tensor) -> None:
    """total[tokens] += grad, in an order that does not change from run to run: on CUDA index_put_ sorts before it adds and
    index_add_ is atomic; on a CPU with several threads it is the other way round."""
    if total_VH.is_cuda:
        total_VH.index_put_((tokens_T,), grad_TH, accumulate=True)
    else:
        total_VH.index_add_(0, tokens_T, grad_TH)


def _on_cpu(stats: TokenStats) -> TokenStats:
    return TokenStats(
        log_probs_T=stats.log_probs_T.cpu(), entropy_T=None if stats.entropy_T is None else stats.entropy_T.cpu()
    )


def _cap_gpu_memory(device: torch.device, cap_bytes: int) -> None:
    """The allocator may reserve so much and no more: an allocation over it is an error here, not a surprise for the engine that
    shares the card. Expandable segments keep what is reserved close to what is allocated."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), device)
