"""Update: the life of one AdamW update, from the promise that it comes until it is carried out or taken back.

A deferred update starts when the gradient norm, and so the clip factor, is known. An early update starts beneath
backward: it guesses that nothing will be clipped, steps blocks with factor 1 as their gradients land, and corrects them
if it was wrong.

    CLOSED --promise--> PROMISED --guess--> GUESSED --end--> CONFIRMED
                            |                  |
                            +----take_back-----+-----------> TAKEN_BACK

From CONFIRMED and TAKEN_BACK the next update is promised as from CLOSED. A deferred update ends from where it is: from
PROMISED when a guess was not worth while, from one of the three others when nobody promised it.

A right guess gives the deferred result to the bit. After a wrong one what was stepped is taken back and stepped again
with the right factor, equal to fp32 rounding. Which blocks are stepped early depends on norms alone, never on how far
the worker has come: a run repeats to the bit, and resumes so, since checkpoints keep the norms.

StreamTrainer calls everything but `landed`, which is called on the thread that waits for gradients.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatrain_rl.config import AdamWConfig
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.model.decoder import Block, DecoderSpec
from megatrain_rl.optim.host_adamw import HostAdamW

_REMEMBERED_NORMS = 4
# Norms this far below the limit seldom jump over it in one step.
_MARGIN = 0.9


class State(Enum):
    """Where an update stands. While it is PROMISED or GUESSED nobody but the worker may read or write weights."""

    CLOSED = "closed"  # there was none yet
    PROMISED = "promised"  # the caller's next call ends it or takes it back; nothing is stepped
    GUESSED = "guessed"  # promised, and blocks are stepped with clip factor 1 as their gradients land
    CONFIRMED = "confirmed"  # the factor is known; the worker does or corrects what is left, and readers wait for it
    TAKEN_BACK = "taken back"  # dropped; weights and moments are as before it once the worker is through


@dataclass(frozen=True, kw_only=True)
class OptimStepResult:
    """grad_norm: global L2 norm before clipping.
    stepped: False when the norm or a loss was not finite; nothing changed then.
    skipped_steps: number of such steps since the start.
    lr: learning rate of this step, or the one it would have had.
    """

    grad_norm: float
    stepped: bool
    skipped_steps: int
    lr: float


class ClipGate:
    """The limit of the gradient norm, and whether the next norm is likely to stay below it.

    A wrong guess costs two more passes over what was stepped so far, so it is made only while norms stay well below the
    limit.
    clip_grad: the limit, or None or 0 for no clipping, when every guess is right.
    """

    def __init__(self, clip_grad: float | None):
        self.limit = clip_grad or math.inf
        self._norms: deque[float] = deque(maxlen=_REMEMBERED_NORMS)

    @property
    def quiet(self) -> bool:
        """Whether a guess is worth making: norms were seen, and the last few were well below the limit."""
        if self.limit == math.inf:
            return True
        return bool(self._norms) and max(self._norms) <= _MARGIN * self.limit

    def factor(self, grad_norm: float) -> float:
        """The clip factor of torch.nn.utils.clip_grad_norm_."""
        return min(1.0, self.limit / (grad_norm + 1e-6))

    def saw(self, grad_norm: float) -> None:
        self._norms.append(grad_norm)

    def state_dict(self) -> list[float]:
        return list(self._norms)

    def load_state_dict(self, norms: list[float]) -> None:
        self._norms = deque(norms, maxlen=_REMEMBERED_NORMS)


@dataclass
class _Guess:
    """What an early update has done so far.

    limit: the gradient norm beyond which the guess is lost.
    to_land: how often the gradient of each block is still to land.
    stepped: blocks stepped, or queued to be, with factor 1.
    held: blocks that wait for the factor.
    """

    lr: float
    limit: float
    to_land: dict[str, int]
    square_sum: float = 0.0
    lost: bool = False
    stepped: list[Block] = field(default_factory=list)
    held: list[Block] = field(default_factory=list)


class Update:
    """The one update that is promised, under way or over; `gradients` go in, `optimizer` steps.

    overlap: whether an update may start early.
    nonfinite_loss: set when a loss was not finite; the update is then not guessed, and skipped at its end.
    """

    def __init__(
        self, spec: DecoderSpec, gradients: HostGradients, optimizer: HostAdamW, adamw: AdamWConfig, *, overlap: bool
    ):
        self.gradients = gradients
        self.optimizer = optimizer
        self.gate = ClipGate(adamw.clip_grad)
        self.state = State.CLOSED
        self.nonfinite_loss = False
        self.skipped_steps = 0
        self._weight_decay = adamw.weight_decay
        self._overlap = overlap
        self._num_blocks = len(spec.blocks)
        # A tied matrix lands twice in a sweep: with the head's part, then with the embedding's added.
        self._landings = {b.name: 2 if spec.tied and b is spec.embed else 1 for b in spec.blocks}
        # Shared with the thread that calls `landed`; guarded, like `state`, by the optimizer's `together`.
        self._guess: _Guess | None = None

    @property
    def pending(self) -> bool:
        """Whether an update is promised and has not ended."""
        return self.state in (State.PROMISED, State.GUESSED)

    def promise(self) -> None:
        """The caller's next call after this backward is `end` or `take_back`."""
        assert not self.pending
        self.state = State.PROMISED

    def guess(self, *, lr: float) -> None:
        """Backward is about to finish the gradients of a promised update: begin beneath it if that is worth while."""
        if self.state is not State.PROMISED or not self._worth_a_guess(lr):
            return
        self.optimizer.begin(lr=lr)
        with self.optimizer.together():
            self._guess = _Guess(lr=lr, limit=self.gate.limit, to_land=dict(self._landings))
            self.state = State.GUESSED

    def _worth_a_guess(self, lr: float) -> bool:
        # a weight that decays to nothing does not come back
        reversible = self.optimizer.can_undo and lr * self._weight_decay < 1
        return self._overlap and reversible and not self.nonfinite_loss and self.gate.quiet

    def landed(self, block: Block, norm: float) -> None:
        """The gradient of `block` has landed with this norm; without a guess that says nothing.

        Once the norms so far are over the limit, or not finite, the guess is lost and further blocks wait for the
        factor. So does the last block: the factor is about to be known.
        """
        with self.optimizer.together():
            guess = self._guess
            if guess is None:
                return
            guess.to_land[block.name] -= 1
            if guess.to_land[block.name] > 0:
                return
            guess.square_sum += norm * norm
            so_far = math.sqrt(guess.square_sum)
            guess.lost |= not (math.isfinite(so_far) and so_far <= guess.limit)
            last = len(guess.stepped) + len(guess.held) == self._num_blocks - 1
            if guess.lost or last:
                guess.held.append(block)
            else:
                guess.stepped.append(block)
                self.optimizer.step_guarded(block)

    def end(self, *, lr: float) -> OptimStepResult:
        """Every gradient has landed: clip and step at `lr`, or at the rate of the guess. A norm or loss that is not
        finite takes the update back. Returns at once; gradients are gone afterwards. A ValueError without complete
        gradients."""
        # A sweep that failed leaves a gradient in some blocks only; a non-finite loss skips the step anyway.
        if not self.nonfinite_loss and not self.gradients.complete:
            raise ValueError(
                "optim_step without complete gradients: call forward_backward first, and zero_grad after one that failed"
            )
        grad_norm = math.nan if self.nonfinite_loss else self.gradients.norm()
        stepped = math.isfinite(grad_norm)
        lr = lr if self._guess is None else self._guess.lr
        if stepped:
            self.gate.saw(grad_norm)
            self.confirm(lr=lr, grad_scale=self.gate.factor(grad_norm))
        else:
            self.skipped_steps += 1
        self.take_back()
        return OptimStepResult(grad_norm=grad_norm, stepped=stepped, skipped_steps=self.skipped_steps, lr=lr)

    def confirm(self, *, lr: float, grad_scale: float) -> None:
        """`grad_scale` is the clip factor: carry the update out, or correct it. Returns at once."""
        if self._guess is None:
            self.optimizer.start_step(lr=lr, grad_scale=grad_scale)
            self.state = State.CONFIRMED
            return
        with self.optimizer.together():
            guess, self._guess, self.state = self._guess, None, State.CONFIRMED
            assert len(guess.stepped) + len(guess.held) == self._num_blocks
            for block in guess.stepped:
                if grad_scale == 1.0:
                    self.optimizer.finish(block)
                else:
                    self.optimizer.undo(block, then_grad_scale=grad_scale)
            for block in guess.held:
                self.optimizer.step(block, grad_scale=grad_scale)

    @property
    def idle(self) -> bool:
        """Whether nothing waits for the next update: no gradient, and no loss for which it would be skipped."""
        return not (self.gradients.any or self.nonfinite_loss)

    def require_no_gradients(self, what: str) -> None:
        """A ValueError if gradients of the present weights wait for an update; `what` would make them meaningless."""
        if not self.idle:
            raise ValueError(
                f"{what}: gradients wait for an update of the present weights; call optim_step or zero_grad first"
            )

    def take_back(self) -> None:
        """Drop the gradients and a pending update; weights and moments are then as before it, to fp32 rounding.

        Returns at once: the worker does it, and readers wait for it.
        """
        with self.optimizer.together():
            guess, self._guess = self._guess, None
            if guess is not None:
                for block in guess.stepped:
                    self.optimizer.undo(block)
                self.optimizer.uncount()
            if self.pending:
                self.state = State.TAKEN_BACK
        self.gradients.clear()
        self.nonfinite_loss = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "skipped_steps": self.skipped_steps,
            "step_count": self.optimizer.step_count,
            "recent_norms": self.gate.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_steps = state["skipped_steps"]
        self.optimizer.step_count = state["step_count"]
        self.gate.load_state_dict(state["recent_norms"])
