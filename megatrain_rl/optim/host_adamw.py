"""HostAdamW: optimizer state in host RAM, and the thread that steps it while the caller goes on.

State per parameter: int16 residual (bf16 weights only), exp_avg and exp_avg_sq (fp32, or bf16 by choice); flat per block, laid out
like the weights. Whoever reads a block's weights waits for that block in `HostStore.read`.

An update is either deferred, started by `start_step` when the clip factor is known, or a guess: `guess` opens it before backward, `offer`
hands over each block as its gradient lands and the block is stepped with factor 1, and `confirm` or `revoke` ends it when the norm is
known. A right guess gives the deferred result to the bit. After a wrong one what was stepped is taken back and stepped again with
the right factor, equal to fp32 rounding. Which blocks go which way depends on norms alone, never on how far the thread has come.
"""

import heapq
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class _Pass:
    """One pass over a block. lr, step: of the update, as a library wants them."""

    mode: Mode
    scalars: AdamWScalars
    lr: float
    step: int


@dataclass
class _Guess:
    """An open update. limit: of the gradient norm, beyond which the guess is lost. guessed: blocks stepped, or queued to be, with factor
    1; held: blocks that wait for the factor."""

    lr: float
    limit: float
    square_sum: float = 0.0
    lost: bool = False
    guessed: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)


class HostAdamW:
    """Steps `store` with `gradients`. `step_count` is the number of updates applied or started.

    can_guess: whether this optimizer can take a step back; a library's cannot, nor can moments in bf16 that forget at once.
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
        self.can_guess = library is None and not (state_dtype == torch.bfloat16 and 0 < adamw.betas[1] < 0.5)
        self._state_dtype = state_dtype
        self.step_count = 0
        self.waited_s = 0.0
        self.intervals: deque[Interval] = deque(maxlen=4096)
        # Everything below is shared with the worker and guarded by `_changed`.
        self._changed = threading.Condition()
        self._waiting: list[int] = []  # heap of blocks with a job; the one that the next forward needs first is next
        self._jobs: dict[int, tuple[_Pass, ...]] = {}
        self._busy: int | None = None
        self._closing = False
        self._guess: _Guess | None = None
        self._left: dict[int, int] = {}  # by block of the last guess that was stepped: elements left for Mode.FINISH
        self._marks: dict[int, Tensor] = {}  # where they are
        self._worker = threading.Thread(target=self._run, name="host-adamw", daemon=True)
        self._worker.start()

    # ---- an update whose clip factor is known ----

    def start_step(self, *, lr: float, grad_scale: float) -> None:
        """Begin one update of every block. Gradients must have landed; they count as used once their block is stepped."""
        self._begin()
        step = self._pass(Mode.STEP, lr, grad_scale)
        with self._changed:
            for i in range(len(self._blocks)):
                self._put(i, step)

    # ---- an update that starts beneath backward ----

    @property
    def open_lr(self) -> float | None:
        """Learning rate of the update that waits for `confirm` or `revoke`, or None when there is none."""
        return None if self._guess is None else self._guess.lr

    def guess(self, *, lr: float, limit: float) -> None:
        """Open an update with clip factor 1, right if the gradient norm stays within `limit`; blocks follow by `offer`."""
        assert self.can_guess and self._guess is None
        self._begin()
        with self._changed:
            self._left.clear()
            self._guess = _Guess(lr=lr, limit=limit)

    def offer(self, block: Block, norm: float) -> None:
        """The gradient of `block` is complete in host memory and has this norm. Called on the thread that waits for landings.

        Once the norms so far are over the limit, or not finite, the guess is lost and further blocks wait for the factor. So does the
        last one: the factor is about to be known.
        """
        with self._changed:
            guess = self._guess
            if guess is None:
                return
            guess.square_sum += norm * norm
            so_far = math.sqrt(guess.square_sum)
            guess.lost |= not (math.isfinite(so_far) and so_far <= guess.limit)
            i = self._index[block.name]
            last = len(guess.guessed) + len(guess.held) == len(self._blocks) - 1
            if guess.lost or last:
                guess.held.append(i)
            else:
                guess.guessed.append(i)
                self._put(i, self._pass(Mode.GUARDED, guess.lr, 1.0))

    def confirm(self, *, grad_scale: float) -> None:
        """Every block has been offered and this is the clip factor. Returns at once."""
        with self._changed:
            guess, self._guess = self._guess, None
            assert guess is not None and len(guess.guessed) + len(guess.held) == len(self._blocks)
            step = self._pass(Mode.STEP, guess.lr, grad_scale)
            if grad_scale == 1.0:
                self._follow(guess, self._pass(Mode.FINISH, guess.lr, 1.0))
            else:
                self._follow(guess, self._pass(Mode.UNDO, guess.lr, 1.0), step)
            for i in guess.held:
                self._put(i, step)

    def revoke(self) -> None:
        """Take the update back: weights and moments as before `guess`, to fp32 rounding. Returns at once."""
        with self._changed:
            guess, self._guess = self._guess, None
            if guess is not None:
                self._follow(guess, self._pass(Mode.UNDO, guess.lr, 1.0))
                self.step_count -= 1

    def _follow(self, guess: _Guess, *passes: _Pass) -> None:
        """Queue these after the guarded pass of every guessed block, whether it has run or not."""
        for i in guess.guessed:
            if i in self._jobs:
                self._jobs[i] = (*self._jobs[i], *passes)
            elif passes[0].mode is not Mode.FINISH or i == self._busy or self._left.get(i):
                self._put(i, *passes)

    # ---- rest ----

    def wait(self) -> None:
        """Until the update is complete; raises what went wrong in it."""
        self.settle()
        self._store.read(self._blocks[0])

    def settle(self) -> None:
        """Until the worker is idle, whatever came of its work."""
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

    def _begin(self) -> None:
        self.wait()
        self.step_count += 1

    def _pass(self, mode: Mode, lr: float, grad_scale: float) -> _Pass:
        a = self._adamw
        scalars = AdamWScalars.of(
            lr=lr, betas=a.betas, eps=a.eps, weight_decay=a.weight_decay, step=self.step_count, grad_scale=grad_scale,
            moments=self._state_dtype,
        )  # fmt: skip
        return _Pass(mode, scalars, lr, self.step_count)

    def _put(self, i: int, *passes: _Pass) -> None:
        """Close the block to readers and queue it. The caller holds `_changed`."""
        self._store.begin_write(self._blocks[i])
        self._jobs[i] = passes
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
