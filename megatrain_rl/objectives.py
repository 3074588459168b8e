"""The seam between the streamed model and a loss.

The head hands an objective the per-token statistics of one pack as autograd leaves; the objective returns a scalar loss
of them; the head calls `.backward()` on it and carries the leaves' gradients on into head and layers. A loss must
therefore be normalised by counts of the whole mini-batch, not of the pack, or the update depends on how packs are cut.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from megatrain_rl.batch import PackedBatch


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Per-token results of one pack, fp32, aligned with its tokens (see `PackedBatch`); 0 where `predict_T` is False.

    log_probs_T: log p(token t+1 | tokens <= t) at the pack's temperature.
    entropy_T: entropy in nats of that distribution, or None when it was not asked for.
    """

    log_probs_T: Tensor
    entropy_T: Tensor | None = None

    def detach(self) -> "TokenStats":
        return self._each(lambda values_T: values_T.detach())

    def cpu(self) -> "TokenStats":
        return self._each(lambda values_T: values_T.cpu())

    def _each(self, function: Callable[[Tensor], Tensor]) -> "TokenStats":
        entropy_T = None if self.entropy_T is None else function(self.entropy_T)
        return TokenStats(log_probs_T=function(self.log_probs_T), entropy_T=entropy_T)


@dataclass(frozen=True, kw_only=True)
class ObjectiveOutput:
    loss: Tensor  # scalar
    metrics: dict[str, Any] = field(default_factory=dict)


def checked(output: Any) -> ObjectiveOutput:
    """The output of an objective as it is, or a ValueError that says what an objective has to return."""
    loss = output.loss if isinstance(output, ObjectiveOutput) else None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        given = type(output).__name__ if not isinstance(output, ObjectiveOutput) else f"a loss of {_described(loss)}"
        raise ValueError(
            f"an objective returns ObjectiveOutput(loss=...) with a floating-point tensor of one number, not {given}"
        )
    return output


def _described(loss: Any) -> str:
    return f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"


class Objective(Protocol):
    def __call__(self, stats: TokenStats, pack: PackedBatch) -> ObjectiveOutput: ...


class NegativeLogLikelihood:
    """Mean negative log-likelihood over the predicted tokens of a whole mini-batch (supervised fine-tuning)."""

    def __init__(self, packs: list[PackedBatch]):
        self._num_predicted = max(1, sum(int(p.predict_T.sum()) for p in packs))

    def __call__(self, stats: TokenStats, pack: PackedBatch) -> ObjectiveOutput:
        return ObjectiveOutput(loss=-stats.log_probs_T.sum() / self._num_predicted)
