"""Which processes a run has, what each is (the trainer, the rollout engine or another), and their host memory.

Under Ray a run is its raylet and everything that started from it, so two runs under one raylet are counted together.
Without Ray it is this process, which trains, and what it started. Processes come and go between two looks, and while
one of them is looked at. Used by memory.py.
"""

import os
import re
from pathlib import Path
from typing import Literal

import psutil

Role = Literal["trainer", "engine", "other"]

# Titles that Ray, vLLM and the workers' classes give their processes.
_ENGINE = re.compile(r"VLLM::|ray::\w*(vLLM|VLLM|EmbeddedServer)")
_TRAINER = re.compile(r"ray::\w*(WorkerDict|ActorRolloutRefWorker|TrainingWorker)")
# What psutil raises, mostly its own errors, for a process that ends while it is looked at or belongs to another user
_GONE = (psutil.Error, OSError, ValueError)


class RunProcesses:
    """The processes of this run, as of the last `refresh`. roles: what each is, by its id. pid: stands in for this
    process in tests."""

    def __init__(self, pid: int | None = None):
        self.roles: dict[int, Role] = {}
        self._pid = os.getpid() if pid is None else pid
        self._processes: list[psutil.Process] = []

    def refresh(self) -> None:
        """Look again. What an engine's process started belongs to the engine, whatever its title."""
        # Not kept from the last look: psutil knows a child by its start time, and the clock may have been set since.
        me = psutil.Process(self._pid)
        parent = me.parent()
        under_ray = parent is not None and Path(_title(parent).split(" ")[0]).name == "raylet"
        root = parent if under_ray else me
        below = _below(root)
        roles: dict[int, Role] = {root.pid: "other" if under_ray else "trainer"}
        roles |= {process.pid: _role(process) for process in below}
        engines: set[int] = set()
        for process in below:
            if roles[process.pid] == "engine" and process.pid not in engines:
                engines |= {process.pid, *(child.pid for child in _below(process))}
        for pid in engines & roles.keys():
            roles[pid] = "engine"
        self.roles = roles
        self._processes = [root, *below]

    def rss_bytes(self) -> dict[str, int]:
        """Resident host memory. `trainer`: of the trainer's processes. `run`: of all; what each has to itself, and what
        they share once, taken as the most that one of them shares."""
        trainer = own = most_shared = 0
        for process in self._processes:
            try:
                memory = process.memory_info()
            except _GONE:
                continue
            if self.roles[process.pid] == "trainer":
                trainer += memory.rss
            own += memory.rss - memory.shared
            most_shared = max(most_shared, memory.shared)
        return {"trainer": trainer, "run": own + most_shared}


def _below(process: psutil.Process) -> list[psutil.Process]:
    """All that `process` started, and what those started."""
    try:
        return process.children(recursive=True)
    except _GONE:
        return []


def _role(process: psutil.Process) -> Role:
    title = _title(process)
    if _ENGINE.match(title):
        return "engine"
    return "trainer" if _TRAINER.match(title) else "other"


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except _GONE:
        return ""
