"""SpeculationGate: whether an update may start before the gradient norm is known.

A wrong guess costs two more passes over what was stepped so far, so the optimizer guesses only while norms stay well below the clip limit.
Depends on norms alone: a run repeats to the bit, and resumes so, since checkpoints keep what is remembered here.
"""

from collections import deque

_REMEMBERED = 4
# Norms this far below the limit seldom jump over it in one step.
_MARGIN = 0.9


class SpeculationGate:
    """clip_grad: limit of the norm, or None or 0 for no clipping, when every guess is right."""

    def __init__(self, clip_grad: float | None):
        self._limit = clip_grad or float("inf")
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def limit(self) -> float:
        """Of the norm, beyond which something is clipped; infinite without clipping."""
        return self._limit

    @property
    def open(self) -> bool:
        if self._limit == float("inf"):
            return True
        return bool(self._norms) and max(self._norms) <= _MARGIN * self._limit

    def saw(self, grad_norm: float) -> None:
        self._norms.append(grad_norm)

    def state_dict(self) -> list[float]:
        return list(self._norms)

    def load_state_dict(self, norms: list[float]) -> None:
        self._norms = deque(norms, maxlen=_REMEMBERED)
