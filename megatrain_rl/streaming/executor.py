"""StreamExecutor: runs a sweep. Layers outside, packs inside; one layer's weights on the device at a time.

The order comes from LayerSchedule, transfers from the ring, the slabs and the activation store; what is here is the
arithmetic between them. StreamTrainer chooses the store: handing it the frozen one gives reference log-probs.

Shapes: T tokens of a pack, H hidden size, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatrain_rl.batch import PackedBatch
from megatrain_rl.config import StreamConfig
from megatrain_rl.head import Head
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.host.store import WeightStore
from megatrain_rl.model.attention import resolve_backend
from megatrain_rl.model.decoder import EMBED_WEIGHT, Block, DecoderSpec
from megatrain_rl.model.template import LayerRunner
from megatrain_rl.objectives import Objective, TokenStats
from megatrain_rl.planner import PACK_MULTIPLE, ROTARY_TOKENS, MemoryPlan, check_packs, compiles, cut_sweeps
from megatrain_rl.streaming.device_pack import DevicePack, padded_tokens
from megatrain_rl.streaming.embedding import add_embedding_gradient
from megatrain_rl.streaming.gradient_sums import GradientSums
from megatrain_rl.streaming.head_pass import ForwardBackwardOutput, HeadPass, HeadWeights, head_blocks
from megatrain_rl.streaming.hidden import HiddenStates
from megatrain_rl.streaming.schedule import Kind, LayerSchedule, Visit
from megatrain_rl.transfer.activations import ActivationStore
from megatrain_rl.transfer.arena import DeviceReservation, cap_device_memory, release_cached_memory, within_budget
from megatrain_rl.transfer.lanes import Lanes
from megatrain_rl.transfer.weight_ring import WeightRing


def _on_compute_lane(sweep):
    """Kernels of a sweep go to the lane that the transfers' marks refer to, whatever stream the caller is on. After an
    error nothing is under way any more and no weights are held."""

    @functools.wraps(sweep)
    def run(self, *args, **kwargs):
        with self._lanes.compute:
            try:
                return sweep(self, *args, **kwargs)
            except BaseException:
                # of a device that is lost: the error on its way up is the one to tell
                with contextlib.suppress(RuntimeError):
                    self._abandon()
                raise

    return run


class StreamExecutor:
    """Holds no weights between sweeps; `enable_training` allocates what gradients need. One caller at a time."""

    def __init__(self, spec: DecoderSpec, config: StreamConfig, plan: MemoryPlan, device: torch.device):
        dtype = config.param_torch_dtype
        cuda = device.type == "cuda"
        backend = resolve_backend(config.attention, device, dtype)  # first: it may refuse the setting
        compiled = cuda and compiles(config, spec)
        if compiled and backend == "sdpa":
            raise ValueError(
                "compile=true needs attention=varlen or flash_attn and param_dtype=bfloat16; set compile=null or change these"
            )
        self._spec = spec
        self._plan = plan
        self._device = device
        self._dtype = dtype
        self._config = config
        self._pack_multiple = PACK_MULTIPLE if compiled else 1
        release_cached_memory(device)
        with contextlib.ExitStack() as undo:
            cap_device_memory(device, self, plan.gpu_cap_bytes)
            undo.callback(cap_device_memory, device, self, None)
            with within_budget(device, plan.gpu_cap_bytes):
                self._lanes = Lanes.on(device)
                self._runner = LayerRunner(spec, device, dtype, backend, compiled)
                self._head = Head(compile=compiled)
                self._ring = WeightRing(self._lanes, device, config.ring_depth, spec.max_layer_numel, dtype)
                self._runner.warm_up()
                # whole until it is used; VERL empties the cache once the model is set up
                self._reservation = DeviceReservation(device, plan.reserved_bytes)
                undo.callback(self._reservation.close)
                self._activations = ActivationStore(
                    self._lanes, device, spec.hidden_size, dtype, arena_bytes=plan.hidden_bytes, pin=cuda
                )
            undo.pop_all()
        self._sums: GradientSums | None = None  # forward only

    @_on_compute_lane
    def enable_training(self, gradients: HostGradients, on_landed: Callable[[Block, float], None]) -> None:
        """Gradients will land in `gradients`.

        on_landed(block, norm): called on a thread of its own when the gradient of `block` has. That of a tied embedding
            lands twice in a sweep, the second time complete.
        """
        self.use_reservation()
        with within_budget(self._device, self._plan.gpu_cap_bytes):
            self._sums = GradientSums(
                self._lanes, self._device, self._config, self._plan.slab_numel, gradients, on_landed
            )

    def use_reservation(self) -> None:
        """From now on the reserved memory is there to be cut."""
        self._reservation.open()

    def padded_tokens(self, pack: PackedBatch) -> int:
        """Tokens of `pack` as layers see it."""
        return padded_tokens(pack, self._pack_multiple)

    def sweeps(self, packs: Sequence[PackedBatch], plan: MemoryPlan, *, train: bool) -> list[list[PackedBatch]]:
        """`packs` in groups that go through the layers together. A ValueError for a pack that cannot go at all."""
        check_packs(plan, self._config, packs, vocab_size=self._spec.vocab_size)
        schedule = LayerSchedule(self._spec.num_layers, self._config.checkpoint_interval, train=train)
        tokens = [self.padded_tokens(pack) for pack in packs]
        hidden_bytes = self._spec.hidden_size * self._dtype.itemsize
        return cut_sweeps(plan, packs, tokens, bytes_per_token=schedule.num_slots * hidden_bytes)

    @torch.no_grad()
    @_on_compute_lane
    def log_probs(self, packs: Sequence[PackedBatch], store: WeightStore, *, entropy: bool) -> list[TokenStats]:
        """Statistics of `packs` under the weights of `store`, on the CPU."""
        schedule = LayerSchedule(self._spec.num_layers, self._config.checkpoint_interval, train=False)
        device_packs, hidden = self._begin(packs, schedule)
        weights = self._forward(schedule, store, device_packs, hidden)
        self._lanes.compute.wait(weights.ready)
        head = HeadPass(self._spec, self._runner, self._head, self._plan, weights.flats, sums=None)
        stats = [head.stats(hidden.take_final(m), dp, entropy=entropy) for m, dp in enumerate(device_packs)]
        return [each.cpu() for each in stats]

    @torch.no_grad()
    @_on_compute_lane
    def forward_backward(
        self,
        packs: Sequence[PackedBatch],
        store: WeightStore,
        objective: Objective,
        *,
        entropy: bool,
        before_backward: Callable[[], None] | None,
    ) -> ForwardBackwardOutput:
        """One sweep of forward and backward; gradients are added to what HostGradients holds and land asynchronously.

        before_backward: called once every loss is known to be finite and before the first gradient leaves.
        """
        out = self._training_sums()
        out.begin()
        schedule = LayerSchedule(self._spec.num_layers, self._config.checkpoint_interval, train=True)
        device_packs, hidden = self._begin(packs, schedule)
        weights = self._forward(schedule, store, device_packs, hidden)
        backward = schedule.visits[schedule.num_forward :]
        if self._plan.ring_in_head:
            self._ring.begin(store, [self._spec.layers[v.layer] for v in backward])
        result, sums = self._head_pass(device_packs, weights, objective, hidden, entropy)
        del weights  # the output matrix makes room for the layers' backward
        if result.nonfinite_loss:
            self._abandon()
            return result
        if before_backward is not None:
            before_backward()
        while sums:  # no name may keep a pushed sum alive: it is as large as the output matrix
            out.push(*sums.pop())
        if not self._plan.ring_in_head:
            self._ring.begin(store, [self._spec.layers[v.layer] for v in backward])
        self._backward(backward, device_packs, hidden)
        self._ring.park()
        self._embedding_gradient(device_packs, hidden)
        return result

    def drain(self) -> None:
        """Wait until every gradient has landed; raises what went wrong on the way."""
        if self._sums is not None:
            self._sums.drain()

    def close(self) -> None:
        """Every part, whatever comes of the others: a device may be lost."""
        with contextlib.ExitStack() as then:
            then.callback(cap_device_memory, self._device, self, None)
            then.callback(self._reservation.close)
            then.callback(self._ring.abandon)
            then.callback(self._activations.close)
            if self._sums is not None:
                then.callback(self._sums.close)

    # ---- the sweep's parts ----

    def _abandon(self) -> None:
        """End a sweep where it is: nothing is under way any more and no weights are held."""
        self._lanes.synchronize()
        self._ring.abandon()

    def _begin(self, packs: Sequence[PackedBatch], schedule: LayerSchedule) -> tuple[list[DevicePack], HiddenStates]:
        self.use_reservation()
        tokens = [self.padded_tokens(pack) for pack in packs]
        self._activations.begin(schedule.num_slots, tokens)
        before = 0
        device_packs = []
        for pack in packs:
            before += pack.num_computed
            device_packs.append(
                DevicePack.of(
                    pack,
                    self._runner,
                    self._device,
                    multiple=self._pack_multiple,
                    keep_rotary=before <= ROTARY_TOKENS,
                )
            )
        return device_packs, HiddenStates(self._activations, schedule, tokens, self._plan.resident_bytes)

    def _forward(
        self, schedule: LayerSchedule, store: WeightStore, packs: list[DevicePack], hidden: HiddenStates
    ) -> HeadWeights:
        """Every layer over every pack. Returns the head's weights; with room they cross while the last layer runs."""
        visits = schedule.visits[: schedule.num_forward]
        self._ring.begin(store, [self._spec.layers[v.layer] for v in visits])
        self._embed(store, packs, 0)
        head = None
        for v, visit in enumerate(visits):
            last = v == len(visits) - 1
            if last and self._plan.ring_in_head and all(store.readable(b) for b in head_blocks(self._spec)):
                head = self._upload_head(store)
            # the first layer's packs are gathered on the host one ahead of compute
            feed = functools.partial(self._embed, store, packs) if v == 0 else None
            self._forward_visit(visit, None if last else visits[v + 1], packs, hidden, feed)
        self._ring.park()
        return head or self._upload_head(store)

    def _forward_visit(
        self,
        visit: Visit,
        following: Visit | None,
        packs: list[DevicePack],
        hidden: HiddenStates,
        feed: Callable[[int], None] | None = None,
    ) -> None:
        """One layer over every pack, forward. feed(m): makes the input of pack m."""
        block = self._spec.layers[visit.layer]
        hidden.prefetch(visit, 0)
        weights = block.layout.views(self._ring.acquire(block))
        for m, dp in enumerate(packs):
            if feed is not None and m + 1 < len(packs):
                feed(m + 1)
            self._prefetch_after(visit, following, m, len(packs), hidden)
            hidden_TH = hidden.take_input(visit, m)
            hidden.give_output(visit, m, self._runner.layer(visit.layer, weights, hidden_TH, dp.layer_inputs))
        self._ring.release(block)

    def _backward(self, visits: list[Visit], packs: list[DevicePack], hidden: HiddenStates) -> None:
        sum_flat = torch.empty(self._spec.max_layer_numel, dtype=torch.float32, device=self._device)
        for v, visit in enumerate(visits):
            following = visits[v + 1] if v + 1 < len(visits) else None
            if visit.kind is Kind.RECOMPUTE:
                self._forward_visit(visit, following, packs, hidden)
            else:
                self._backward_visit(visit, following, packs, hidden, sum_flat)

    def _backward_visit(
        self,
        visit: Visit,
        following: Visit | None,
        packs: list[DevicePack],
        hidden: HiddenStates,
        sum_flat: Tensor,
    ) -> None:
        """One layer over every pack: recompute and vector-Jacobian product, then its gradient leaves."""
        block = self._spec.layers[visit.layer]
        hidden.prefetch(visit, 0)
        weights = block.layout.views(self._ring.acquire(block))
        total = sum_flat[: block.layout.numel].zero_()
        out = self._training_sums()
        out.prefetch_earlier(block)  # it crosses while this sweep's is computed
        total_views = block.layout.views(total)
        for m, dp in enumerate(packs):
            self._prefetch_after(visit, following, m, len(packs), hidden)
            hidden_TH = hidden.take_input(visit, m)
            grad_TH = hidden.take_gradient(m)
            grad_TH = self._runner.vjp(visit.layer, weights, hidden_TH, dp.layer_inputs, grad_TH, total_views)
            hidden.give_gradient(m, grad_TH)
        self._ring.release(block)
        out.push(block, total)

    def _prefetch_after(self, visit: Visit, following: Visit | None, m: int, num_packs: int, hidden: HiddenStates):
        """One pack ahead; the last pack looks into the next visit."""
        if m + 1 < num_packs:
            hidden.prefetch(visit, m + 1)
        elif following is not None:
            hidden.prefetch(following, 0)

    def _embed(self, store: WeightStore, packs: list[DevicePack], m: int) -> None:
        """Gather the embedding rows of pack `m` on the host, one pack ahead of the first layer."""
        store.rows(self._spec.embed, EMBED_WEIGHT, packs[m].tokens_C, self._activations.host_TH(0, m))
        self._activations.filled(0, m)

    def _upload_head(self, store: WeightStore) -> HeadWeights:
        return HeadWeights.upload(self._lanes, store, head_blocks(self._spec), self._dtype, self._device)

    def _head_pass(
        self,
        packs: list[DevicePack],
        weights: HeadWeights,
        objective: Objective,
        hidden: HiddenStates,
        entropy: bool,
    ) -> tuple[ForwardBackwardOutput, list[tuple[Block, Tensor]]]:
        """Head and objective of every pack; leaves each pack's gradient in `hidden`.

        Returns the gradient sums of the head's blocks, not pushed yet: a non-finite loss must not touch host gradients.
        """
        blocks, out = head_blocks(self._spec), self._training_sums()
        sums = {block.name: out.new(block) for block in blocks}
        self._lanes.compute.wait(weights.ready)
        head = HeadPass(self._spec, self._runner, self._head, self._plan, weights.flats, sums)
        return head.run(packs, hidden, objective, entropy=entropy), [(block, sums[block.name]) for block in blocks]

    def _embedding_gradient(self, packs: list[DevicePack], hidden: HiddenStates) -> None:
        block, out = self._spec.embed, self._training_sums()
        if self._spec.tied:  # the matrix has just had the head's gradient pushed: it comes back and is added to
            out.drain()
        total = out.new(block)
        total_VH = block.layout.view(total, EMBED_WEIGHT)
        for m, dp in enumerate(packs):
            n = dp.pack.num_computed
            grad_TH = hidden.take_gradient(m)[:n]
            add_embedding_gradient(total_VH, dp.tokens_C[:n], grad_TH, padding_idx=self._spec.padding_idx)
        out.push(block, total)

    def _training_sums(self) -> GradientSums:
        assert self._sums is not None, "forward-only executor"
        return self._sums
