"""Where the time between the command and the first step goes, by phase.

The driver notes when its process began (driver/prepare.py); the trainer marks the phases as it goes through them (task_runner/trainer.py). The
trainer's process loads its model beside them and prints its own times (engine/loading.py).
"""

import os
import time
from itertools import pairwise

import psutil

# Set in the driver before Ray starts; a local cluster hands it on to its processes.
STARTED_VARIABLE = "MEGATRAIN_RL_STARTED"
_FIRST = "Ray and the task runner"
# The name of a mark that only ends the phase before it.
END = ""


class StartupTimes:
    """Unix times at which phases began, each its first."""

    def __init__(self):
        self._began: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """The phase begins now, and the one before it ends."""
        self._began.setdefault(phase, time.time())

    def phases_s(self) -> dict[str, float]:
        """Seconds of every phase that has ended, in order."""
        started = os.environ.get(STARTED_VARIABLE)
        points = [] if started is None else [(_FIRST, float(started))]
        points += self._began.items()
        return {phase: end - begin for (phase, begin), (_, end) in pairwise(points)}

    def table(self) -> str:
        phases = self.phases_s()
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items())
        return f"start-up took {sum(phases.values()):.1f} s: {parts}"


def note_start() -> None:
    """Called in the driver: when its process began."""
    os.environ[STARTED_VARIABLE] = str(psutil.Process().create_time())
