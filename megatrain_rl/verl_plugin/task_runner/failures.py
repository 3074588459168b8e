"""Errors of a run whose text does not say what happened are told again, in words of the run, with VERL's or Ray's error as their cause."""

import contextlib
from collections.abc import Iterator

from ray.exceptions import ActorDiedError

_AGAIN = "Start the run again to go on from the last checkpoint."
# What Ray calls the process in which VERL has the trainer's engine, and what VERL says when none of a batch's answers is left.
_TRAINER = "WorkerDict"
_NO_ANSWERS = "no materializable trajectories"


@contextlib.contextmanager
def told_again() -> Iterator[None]:
    """Within, two errors become a RuntimeError that says what happened: the trainer's process has died; every answer of a batch failed."""
    try:
        yield
    except ActorDiedError as error:
        if _TRAINER not in str(error):
            raise
        raise RuntimeError(
            "the trainer's process has died: its own error stands above, or it was killed (the kernel does that when host RAM runs out). "
            + _AGAIN
        ) from error
    except RuntimeError as error:
        if _NO_ANSWERS not in str(error):
            raise
        raise RuntimeError(
            "every answer of this batch failed: the rollout engine has died or refuses the requests, or the reward function raises; "
            "the first error stands above. " + _AGAIN
        ) from error
