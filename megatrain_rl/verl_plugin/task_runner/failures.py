"""Two errors of VERL and Ray whose text does not say what happened are raised again with a text that does.

The new error has VERL's or Ray's as its cause.
"""

import contextlib
from collections.abc import Iterator

from ray.exceptions import ActorDiedError

_AGAIN = "Start the run again to go on from the last checkpoint."
# Ray's name for the process in which VERL has the trainer's engine.
_TRAINER = "WorkerDict"
# A part of VERL's error when none of a batch's answers is left.
_NO_ANSWERS = "no materializable trajectories"
# TransferQueue's error when it is asked for nothing: VERL asks so when every answer of a validation has failed.
_NO_KEYS = "Received an empty list as keys"


@contextlib.contextmanager
def told_again() -> Iterator[None]:
    """Within, two errors become a RuntimeError that says what happened.

    One is the death of the trainer's process. In the other, every answer of a batch, or of a validation, has failed.
    Other errors pass.
    """
    try:
        yield
    except ActorDiedError as error:
        if _TRAINER not in str(error):
            raise
        raise RuntimeError(
            "the trainer's process has died: its own error stands above, or it was killed (the kernel does that when "
            "host RAM runs out). " + _AGAIN
        ) from error
    except (RuntimeError, ValueError) as error:
        if _NO_ANSWERS not in str(error) and _NO_KEYS not in str(error):
            raise
        what = "batch" if _NO_ANSWERS in str(error) else "validation"
        raise RuntimeError(
            f"every answer of this {what} failed: the rollout engine has died or refuses the requests, or the reward "
            "function raises; the first error stands above. " + _AGAIN
        ) from error
