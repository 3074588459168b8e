"""HostAdamW: optimizer state in host RAM, and the thread that steps it while the caller goes on.

State per parameter: int16 residual (bf16 weights only), exp_avg and exp_avg_sq (fp32, or bf16 by choice); flat per block, laid out
like the weights. Whoever reads a block's weights waits for that block in `HostStore.read`.

An update is either deferred, started by `start_step` when the clip factor is known, or speculative: `speculate` opens it before
backward, `offer` hands over each block as its gradient lands and the block is stepped with factor 1, and `confirm` or `revoke` ends it
when the norm is known. Confirming with a smaller factor takes the steps made so far back and repeats them with that factor; the result
equals the deferred one to fp32 rounding, and to the bit when the factor is 1.
"""

import heapq
import math
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.host.pinned import HostRegion
from megatrain_rl.host.store import HostStore
from megatrain_rl.model.decoder import Block, DecoderSpec
from megatrain_rl.ops.adamw import AdamWScalars, adamw_native
from megatrain_rl.ops.build import load_library
from megatrain_rl.optim.library import LibraryAdamW, deepspeed_adamw, torch_adamw


class BlockState:
    """Optimizer state of one block; zero at the start. dtype: of the moments."""

    def __init__(self, block: Block, *, split: bool, dtype: torch.dtype):
        numel = block.layout.numel
        self._regions = [HostRegion(numel, dtype, pin=False) for _ in range(2)]
        self.exp_avg, self.exp_avg_sq = (region.flat for region in self._regions)
        self.residual: Tensor | None = None
        if split:
            self._regions.append(HostRegion(numel, torch.int16, pin=False))
            self.residual = self._regions[-1].flat

    def tensors(self) -> dict[str, Tensor]:
        named = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return named if self.residual is None else {**named, "residual": self.residual}


def make_library(config: StreamConfig, adamw: AdamWConfig) -> LibraryAdamW | None:
    """The library `config.optimizer` names, or None for the native op. What is missing on this machine is an error here, so
    call it before allocating anything."""
    if config.optimizer == "native":
        load_library("adamw")
        return None
    return {"torch": torch_adamw, "deepspeed": deepspeed_adamw}[config.optimizer](adamw)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A stretch of the worker's time, in seconds of `time.perf_counter`."""

    block: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One pass over a block: take `undo` back if it is given, then apply `step` if it is given."""

    undo: AdamWScalars | None
    step: AdamWScalars | None


class HostAdamW:
    """Steps `store` with `gradients`. `step_count` is the number of updates applied or started.

    speculates: whether this optimizer can take a step back; a library's cannot.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        store: HostStore,
        gradients: HostGradients,
        adamw: AdamWConfig,
        library: LibraryAdamW | None,
        *,
        state_dtype: torch.dtype,
        threads: int,
    ):
        self._blocks = spec.blocks
        self._index = {block.name: i for i, block in enumerate(spec.blocks)}
        self._store = store
        self._gradients = gradients
        self._adamw = adamw
        self._threads = threads
        self._library = library
        self.state = {
            b.name: BlockState(b, split=store.dtype == torch.bfloat16, dtype=state_dtype) for b in spec.blocks
        }
        self.speculates = library is None
        self.step_count = 0
        self.intervals: deque[Interval] = deque(maxlen=4096)
        self._lr = 0.0
        # Everything below is shared with the worker and guarded by `_changed`.
        self._changed = threading.Condition()
        self._waiting: list[int] = []  # heap of blocks with a job; the one that the next forward needs first is next
        self._jobs: dict[int, _Job] = {}
        self._busy = False
        self._closing = False
        self._speculative: AdamWScalars | None = None
        self._stepped: list[int] = []  # blocks stepped, or being stepped, with the speculative factor
        self._worker = threading.Thread(target=self._run, name="host-adamw", daemon=True)
        self._worker.start()

    # ---- an update whose clip factor is known ----

    def start_step(self, *, lr: float, grad_scale: float) -> None:
        """Begin one update of every block. Gradients must have landed; they count as used once their block is stepped."""
        self._begin(lr)
        scalars = self._scalars(grad_scale)
        with self._changed:
            for i in range(len(self._blocks)):
                self._put(i, _Job(undo=None, step=scalars))

    # ---- an update that starts beneath backward ----

    @property
    def is_open(self) -> bool:
        """An update was opened and waits for `confirm` or `revoke`."""
        return self._speculative is not None

    def speculate(self, *, lr: float) -> None:
        """Open an update with clip factor 1; blocks follow by `offer`, then `confirm` or `revoke`."""
        assert self.speculates and self._speculative is None
        self._begin(lr)
        self._speculative = self._scalars(1.0)

    def offer(self, block: Block, norm: float) -> None:
        """The gradient of `block` is complete in host memory and has this norm. Called on the thread that waits for landings.

        A norm that is not finite ends the speculation: what is not under way waits for `revoke`.
        """
        with self._changed:
            if self._speculative is None:
                return
            if math.isfinite(norm):
                self._put(self._index[block.name], _Job(undo=None, step=self._speculative))
            else:
                self._waiting.clear()
                self._jobs.clear()

    def confirm(self, *, grad_scale: float) -> None:
        """Every block has been offered and this is the clip factor. Returns at once."""
        with self._changed:
            speculative, self._speculative = self._speculative, None
            assert speculative is not None and len(self._stepped) + len(self._jobs) == len(self._blocks)
            if grad_scale != 1.0:
                scalars = self._scalars(grad_scale)
                for i in list(self._jobs):
                    self._jobs[i] = _Job(undo=None, step=scalars)
                for i in self._stepped:
                    self._put(i, _Job(undo=speculative, step=scalars))
            self._stepped.clear()

    def revoke(self) -> None:
        """Take the update back: weights and moments as before `speculate`, to fp32 rounding. Returns at once."""
        with self._changed:
            speculative, self._speculative = self._speculative, None
            if speculative is None:
                return
            stepped = set(self._stepped)
            for i in set(range(len(self._blocks))) - stepped:
                self._store.end_write(self._blocks[i])
            self._waiting.clear()
            self._jobs.clear()
            for i in stepped:
                self._put(i, _Job(undo=speculative, step=None))
            self._stepped.clear()
            self.step_count -= 1

    # ---- rest ----

    def wait(self) -> None:
        """Until the update is complete; raises what went wrong in it."""
        self.settle()
        self._store.read(self._blocks[0])

    def settle(self) -> None:
        """Until the worker is idle, whatever came of its work."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join()

    # ---- inside ----

    def _begin(self, lr: float) -> None:
        self.wait()
        self.step_count += 1
        self._lr = lr

    def _scalars(self, grad_scale: float) -> AdamWScalars:
        a = self._adamw
        return AdamWScalars.of(
            lr=self._lr,
            betas=a.betas,
            eps=a.eps,
            weight_decay=a.weight_decay,
            step=self.step_count,
            grad_scale=grad_scale,
        )

    def _put(self, i: int, job: _Job) -> None:
        """Close the block to readers and queue it. The caller holds `_changed`."""
        self._store.begin_write(self._blocks[i])
        self._jobs[i] = job
        heapq.heappush(self._waiting, i)
        self._changed.notify_all()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                i = heapq.heappop(self._waiting)
                job = self._jobs.pop(i)
                if self._speculative is not None:
                    self._stepped.append(i)
                self._busy = True
            try:
                self._do(self._blocks[i], job)
                failed = None
            except BaseException as error:  # raised where the weights are read
                failed = error
            with self._changed:
                self._busy = False
                if failed is not None:
                    self._store.fail(failed)
                elif i not in self._jobs:  # else it is to be corrected before anybody reads it
                    self._store.end_write(self._blocks[i])
                self._changed.notify_all()

    def _do(self, block: Block, job: _Job) -> None:
        started = time.perf_counter()
        weight = self._store.begin_write(block)
        state, grad = self.state[block.name], self._gradients.flat(block)
        arrays = (weight, state.residual, grad, state.exp_avg, state.exp_avg_sq)
        if self._library is not None:
            assert job.undo is None
            self._library.step(*arrays, lr=self._lr, step=self.step_count, scale=job.step.grad_scale)
        else:
            # another key for every step and block; odd factors spread them over the 32 bits
            key = (self.step_count * 0x9E3779B1 + self._index[block.name] * 0x85EBCA77) & 0xFFFFFFFF
            if job.undo is not None:
                adamw_native(*arrays, job.undo, self._threads, key=key ^ 0x5BD1E995, undo=True)
            if job.step is not None:
                adamw_native(*arrays, job.step, self._threads, key=key)
        self.intervals.append(Interval(block=block.name, start=started, end=time.perf_counter()))
