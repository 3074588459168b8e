"""Where the time between the command and the first step goes, by phase.

VERL's v1 trainer builds its parts one after the other in one process, so a phase is the time between two of its calls. They are marked by
wrapping these calls; the table is printed when training begins. The trainer loads its model beside them and prints its own times
(loading.py). Only runs whose actor is ours are told. Installed by register.py.
"""

import functools
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType

import psutil

MODULE = "verl.trainer.ppo.v1.trainer_base"
# Set in the driver before Ray starts; a local cluster hands it on to its processes.
STARTED_VARIABLE = "MEGATRAIN_RL_STARTED"
_FIRST = "Ray and the task runner"
# (owner, method, mark when it begins or ends, phase that begins there); in this order
_MARKS = (
    ("PPOTrainer", "__init__", "begins", "tokenizer, data"),
    ("RayWorkerGroup", "__init__", "begins", "worker process"),
    ("RayWorkerGroup", "__init__", "ends", "trainer, GPU memory"),
    ("RewardLoopManager", "__init__", "begins", "reward workers"),
    ("LLMServerManager", "create", "begins", "rollout engine"),
    ("CheckpointEngineManager", "__init__", "begins", "rest of the model, checkpoint"),
    ("PPOTrainer", "_setup", "ends", "rest of the model, first weight sync"),
    ("PPOTrainer", "init", "ends", "agent workers"),
    ("PPOTrainer", "fit", "begins", ""),
)


class StartupTimes:
    """Unix times of the marks, each its first."""

    def __init__(self):
        self._seen: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        self._seen.setdefault(phase, time.time())

    def phases_s(self) -> dict[str, float]:
        """Seconds of every phase whose begin and end were seen, in order."""
        started = os.environ.get(STARTED_VARIABLE)
        points = [] if started is None else [(_FIRST, float(started))]
        points += [(phase, self._seen[phase]) for *_, phase in _MARKS if phase in self._seen]
        return {phase: end - begin for (phase, begin), (_, end) in zip(points, points[1:], strict=False)}

    def table(self) -> str:
        phases = self.phases_s()
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items())
        return f"start-up took {sum(phases.values()):.1f} s: {parts}"


def note_start() -> None:
    """Called in the driver: when its process began."""
    os.environ[STARTED_VARIABLE] = str(psutil.Process().create_time())


def phases_here() -> dict[str, float]:
    """Seconds of the phases that this process has been through; empty where VERL's RL trainer does not run."""
    times = getattr(sys.modules.get(MODULE), "megatrain_startup", None)
    return {} if times is None else times.phases_s()


def install(module: ModuleType) -> StartupTimes:
    """Mark the calls of MODULE, which keeps the times; once."""
    if hasattr(module, "megatrain_startup"):
        return module.megatrain_startup
    times = module.megatrain_startup = StartupTimes()
    call_when(module.PPOTrainer, "fit", "begins", lambda: _tell(times))  # inside the mark made below
    for owner_name, method, when, phase in _MARKS:
        call_when(getattr(module, owner_name), method, when, functools.partial(times.mark, phase))
    return times


def _tell(times: StartupTimes) -> None:
    if os.environ.get(STARTED_VARIABLE) is not None:
        print(times.table(), flush=True)


def call_when(owner: type, name: str, when: str, function: Callable[[], object]) -> None:
    """`function` is called whenever `owner.name` begins, or ends without an error (when: "begins", "ends")."""
    raw = vars(owner)[name]
    wrapped = raw.__func__ if isinstance(raw, classmethod) else raw

    @functools.wraps(wrapped)
    def call(*args, **kwargs):
        if when == "begins":
            function()
        result = wrapped(*args, **kwargs)
        if when == "ends":
            function()
        return result

    setattr(owner, name, classmethod(call) if isinstance(raw, classmethod) else call)
