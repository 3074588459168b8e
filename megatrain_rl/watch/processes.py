"""Which processes a run has and what each is: the trainer, the rollout engine, or another. Read from /proc alone.

Under Ray a run is its raylet and everything that started from it, so two runs under one raylet are counted together; without
Ray it is this process, which trains, and what it started. Processes come and go between two looks. Used by memory_watch.py.
"""

import os
import re
from pathlib import Path
from typing import Literal

from megatrain_rl.profiling import resident_bytes

Role = Literal["trainer", "engine", "other"]

# Titles that Ray and vLLM give their processes. What an engine's process started belongs to the engine.
_ENGINE = re.compile(r"VLLM::|ray::\w*(vLLM|VLLM|EmbeddedServer)")
_TRAINER = re.compile(r"ray::\w*(WorkerDict|ActorRolloutRefWorker|TrainingWorker)")


class RunProcesses:
    """roles: of every process of the run by id, as of the last `refresh`. proc, pid: stand in for /proc and this process in tests."""

    def __init__(self, proc: Path = Path("/proc"), pid: int | None = None):
        self.roles: dict[int, Role] = {}
        self._proc = proc
        self._pid = os.getpid() if pid is None else pid

    def refresh(self) -> None:
        parents = self._parents()
        children: dict[int, list[int]] = {}
        for process, parent in parents.items():
            children.setdefault(parent, []).append(process)
        root = parents.get(self._pid, 0)
        under_ray = Path(self._title(root).split(" ")[0]).name == "raylet"
        roles: dict[int, Role] = {}
        open_ends: list[tuple[int, Role]] = [(root, "other") if under_ray else (self._pid, "trainer")]
        while open_ends:
            process, role = open_ends.pop()
            roles[process] = role
            for child in children.get(process, []):
                open_ends.append((child, "engine" if role == "engine" else self._role(child)))
        self.roles = roles

    def rss_bytes(self) -> dict[str, int]:
        """Resident host memory: `trainer`, of its processes; `run`, of all: what each has to itself, and what they share once, taken as
        the most that one of them shares."""
        trainer = own = most_shared = 0
        for process, role in self.roles.items():
            try:
                resident, shared = resident_bytes(self._proc / str(process))
            except (OSError, ValueError):  # gone, or on its way out
                continue
            if role == "trainer":
                trainer += resident
            own += resident - shared
            most_shared = max(most_shared, shared)
        return {"trainer": trainer, "run": own + most_shared}

    def _parents(self) -> dict[int, int]:
        found = {}
        for entry in self._proc.iterdir():
            if entry.name.isdigit():
                try:
                    # "id (name) state parent ...", and a name may hold spaces and brackets
                    found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, IndexError):
                    continue
        return found

    def _role(self, process: int) -> Role:
        title = self._title(process)
        if _ENGINE.match(title):
            return "engine"
        return "trainer" if _TRAINER.match(title) else "other"

    def _title(self, process: int) -> str:
        try:
            return (self._proc / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
