"""Lifetime: until when, and where, a trainer may be used.

A trainer works until it is closed, and in no process but the one that made it: a forked child has neither its memory
(pinned.py keeps it out) nor its threads. Without this check a child would crash at the first weight or wait for ever.
"""

import contextlib
import os
from collections.abc import Callable


class Lifetime:
    """Parts to be closed, once, the last first, and the process that they belong to."""

    def __init__(self) -> None:
        self._parts = contextlib.ExitStack()
        self._closed = False
        self._process = os.getpid()

    def add(self, close: Callable[[], None]) -> None:
        """`close` of a part that has just been made."""
        self._parts.callback(close)

    def require_open(self) -> None:
        """A ValueError when the trainer is closed, and in a forked child."""
        if os.getpid() != self._process:
            raise ValueError(
                f"this trainer lives in process {self._process} and this is a forked child of it (a DataLoader worker, a "
                "multiprocessing.Process), which has no copy of its memory: use the trainer where it was made"
            )
        if self._closed:
            raise ValueError("the trainer is closed")

    def close(self, first: Callable[[], None]) -> None:
        """Call `first`, then close every part, whatever comes of the others. A second call does nothing, nor does one
        in a forked child."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        with self._parts:
            first()
