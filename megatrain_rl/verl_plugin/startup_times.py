"""The time between the command and the first step, by phase.

The driver notes when its process began (driver/prepare.py). Our subclass of VERL's trainer marks the phases as it goes
through them (task_runner/trainer.py). The process with the engine loads its model at the same time and prints its own
times (engine/loading.py).
"""

import os
import time
from itertools import pairwise

import psutil

# The driver sets this variable before Ray starts; a local Ray cluster hands it on to its processes.
STARTED_VARIABLE = "MEGATRAIN_RL_STARTED"
_FIRST = "Ray and the task runner"
# A mark of this name begins no phase; it only ends the one before it.
END = ""


class StartupTimes:
    """The Unix times at which phases began, in order. A phase that is marked again keeps its first time."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Begin `phase` now, and so end the one before it."""
        self._began.setdefault(phase, time.time())

    def phases_s(self) -> dict[str, float]:
        """The seconds of every phase that has ended, in order."""
        started = os.environ.get(STARTED_VARIABLE)
        points = [] if started is None else [(_FIRST, float(started))]
        points += self._began.items()
        return {phase: end - begin for (phase, begin), (_, end) in pairwise(points)}

    def table(self) -> str:
        """One line: the seconds in all, and of every phase."""
        phases = self.phases_s()
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items())
        return f"start-up took {sum(phases.values()):.1f} s: {parts}"


def note_start() -> None:
    """Note in the environment when this process began. Called in the driver."""
    os.environ[STARTED_VARIABLE] = str(psutil.Process().create_time())
