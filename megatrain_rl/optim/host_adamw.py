"""HostAdamW: optimizer state in host RAM, and the thread that steps blocks while the caller goes on.

State per parameter: int16 residual (bf16 weights only), exp_avg and exp_avg_sq (fp32, or bf16 by choice); flat per
block, laid out like the weights. Whoever reads a block's weights waits for that block in `HostStore.read`.

Which blocks are stepped when, and with which clip factor, is `optim.update.Update`'s to say. Here a block has passes
(step, step what the guard admits, finish what it left, undo) that are queued and run in order. Of the queued blocks the
one that the next forward needs first goes first.
"""

import contextlib
import heapq
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.host.pinned import HostRegion
from megatrain_rl.host.store import HostStore
from megatrain_rl.model.decoder import Block, DecoderSpec
from megatrain_rl.ops.adamw import LEFT_GRAIN, AdamWScalars, Mode, adamw_native
from megatrain_rl.ops.build import load_library
from megatrain_rl.optim.library import LibraryAdamW, deepspeed_adamw, torch_adamw


class BlockState:
    """Optimizer state of one block; zero at the start. dtype: of the moments."""

    def __init__(self, block: Block, *, split: bool, dtype: torch.dtype):
        numel = block.layout.numel
        self.exp_avg, self.exp_avg_sq = (HostRegion(numel, dtype, pin=False).flat for _ in range(2))
        self.residual: Tensor | None = HostRegion(numel, torch.int16, pin=False).flat if split else None

    def tensors(self) -> dict[str, Tensor]:
        named = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return named if self.residual is None else {**named, "residual": self.residual}


def make_library(config: StreamConfig, adamw: AdamWConfig) -> LibraryAdamW | None:
    """The library `config.optimizer` names, or None for the native op. What is missing on this machine is an error
    here, so call it before allocating anything."""
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


@dataclass(frozen=True)
class _Pass:
    """One pass over a block. lr, step: of the update, as a library wants them."""

    mode: Mode
    scalars: AdamWScalars
    lr: float
    step: int


class HostAdamW:
    """Steps `store` with `gradients`. `step_count` is the number of updates applied or started.

    can_undo: whether a step can be taken back; not with a library's optimizer, nor with bf16 moments that forget fast.
    waited_s: seconds that callers have waited for the whole update so far; those of one block are the store's to count.
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
        self.can_undo = library is None and not (state_dtype == torch.bfloat16 and 0 < adamw.betas[1] < 0.5)
        self._state_dtype = state_dtype
        self._lr = adamw.lr  # of the update that has begun last
        self.step_count = 0
        self.waited_s = 0.0
        self.intervals: deque[Interval] = deque(maxlen=4096)
        # Everything below is shared with the worker and guarded by `_changed`.
        self._changed = threading.Condition()
        self._waiting: list[int] = []  # heap of blocks with a job; the one that the next forward needs first is next
        self._jobs: dict[int, tuple[_Pass, ...]] = {}
        self._busy: int | None = None
        self._closing = False
        self._left: dict[int, int] = {}  # by block that this update's guarded pass has been over: elements it left
        self._marks: dict[int, Tensor] = {}  # where they are
        self._worker = threading.Thread(target=self._run, name="host-adamw", daemon=True)
        self._worker.start()

    # ---- one update ----

    def start_step(self, *, lr: float, grad_scale: float) -> None:
        """Begin an update and step every block. Gradients must have landed; a block's is used when it is stepped."""
        self.begin(lr=lr)
        with self.together():
            for block in self._blocks:
                self.step(block, grad_scale=grad_scale)

    def begin(self, *, lr: float) -> None:
        """Begin update number `step_count`, which grows by one, at `lr`, when the one before is complete."""
        self.wait()
        self.step_count += 1
        self._lr = lr
        with self._changed:
            self._left.clear()

    def uncount(self) -> None:
        """The update that began last is being undone: the next one has its number again."""
        self.step_count -= 1

    def together(self) -> contextlib.AbstractContextManager[Any]:
        """A re-entrant lock: what is queued inside reaches the worker when the `with` ends."""
        return self._changed

    # Each of these queues passes over a block and returns at once.

    def step(self, block: Block, *, grad_scale: float) -> None:
        """Step `block` with this clip factor."""
        self._put(block, self._pass(Mode.STEP, grad_scale))

    def step_guarded(self, block: Block) -> None:
        """Step with factor 1 those elements of `block` whose step can be undone; `finish` or `undo` must follow."""
        self._put(block, self._pass(Mode.GUARDED, 1.0))

    def finish(self, block: Block) -> None:
        """Factor 1 was right: step what `step_guarded` left. Where it left nothing the block stays open to readers."""
        with self.together():
            i, finish = self._index[block.name], self._pass(Mode.FINISH, 1.0)
            if i in self._jobs:
                self._jobs[i] = (*self._jobs[i], finish)
            elif i == self._busy or self._left.get(i):
                self._put(block, finish)

    def undo(self, block: Block, *, then_grad_scale: float | None = None) -> None:
        """Factor 1 was wrong: take back what `step_guarded` did or will do; then step with the right factor, if any."""
        passes = [self._pass(Mode.UNDO, 1.0)]
        if then_grad_scale is not None:
            passes.append(self._pass(Mode.STEP, then_grad_scale))
        with self.together():
            self._put(block, *self._jobs.get(self._index[block.name], ()), *passes)

    # ---- rest ----

    def wait(self) -> None:
        """Wait until the update is complete; raises what went wrong in it."""
        self.settle()
        self._store.read(self._blocks[0])

    def settle(self) -> None:
        """Wait until the worker is idle, whatever came of its work."""
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._busy is None)
        self.waited_s += time.perf_counter() - started

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join()
        self.state.clear()  # its memory goes back also when the closed trainer is still named somewhere

    # ---- inside ----

    def _pass(self, mode: Mode, grad_scale: float) -> _Pass:
        a = self._adamw
        scalars = AdamWScalars.of(
            lr=self._lr, betas=a.betas, eps=a.eps, weight_decay=a.weight_decay, step=self.step_count, grad_scale=grad_scale,
            moments=self._state_dtype,
        )  # fmt: skip
        return _Pass(mode, scalars, self._lr, self.step_count)

    def _put(self, block: Block, *passes: _Pass) -> None:
        """Close the block to readers and queue these passes in place of those it may have."""
        i = self._index[block.name]
        with self._changed:
            self._store.begin_write(block)
            if i not in self._jobs:
                heapq.heappush(self._waiting, i)
            self._jobs[i] = passes
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
                self._busy = i
            try:
                self._do(self._blocks[i], job)
                failed = None
            except BaseException as error:  # raised where the weights are read
                failed = error
            with self._changed:
                self._busy = None
                if failed is not None:
                    self._store.fail(failed)
                elif i not in self._jobs:  # else it is to be corrected before anybody reads it
                    self._store.end_write(self._blocks[i])
                self._changed.notify_all()

    def _do(self, block: Block, job: tuple[_Pass, ...]) -> None:
        started = time.perf_counter()
        i = self._index[block.name]
        for each in job:
            if each.mode is Mode.FINISH and not self._left.get(i):
                continue
            left = self._do_pass(block, each)
            if each.mode is Mode.GUARDED:
                self._left[i] = left
        self.intervals.append(Interval(block=block.name, start=started, end=time.perf_counter()))

    def _do_pass(self, block: Block, each: _Pass) -> int:
        state, grad = self.state[block.name], self._gradients.flat(block)
        arrays = (self._store.begin_write(block), state.residual, grad, state.exp_avg, state.exp_avg_sq)
        if self._library is not None:
            assert each.mode is Mode.STEP
            self._library.step(*arrays, lr=each.lr, step=each.step, scale=each.scalars.grad_scale)
            return 0
        # another key for every step and block; odd factors spread them over the 32 bits
        key = (each.step * 0x9E3779B1 + self._index[block.name] * 0x85EBCA77) & 0xFFFFFFFF
        if each.mode is Mode.UNDO:
            key ^= 0x5BD1E995
        return adamw_native(*arrays, each.scalars, self._threads, key=key, mode=each.mode, left=self._left_marks(block))

    def _left_marks(self, block: Block) -> Tensor:
        i = self._index[block.name]
        if i not in self._marks:
            self._marks[i] = torch.empty(-(-block.layout.numel // LEFT_GRAIN), dtype=torch.uint8)
        return self._marks[i]
