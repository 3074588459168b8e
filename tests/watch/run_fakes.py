"""Stand-ins for /proc and NVML, so that a run under Ray has the processes, GPUs and errors that a test wants."""

import os
from pathlib import Path
from types import SimpleNamespace

GIB = 2**30
STAGES_S = {"gen": 2.0, "old_log_prob": 1.0, "ref": 1.0, "update_actor": 3.0, "update_weights": 0.5, "step": 8.0}
PAGE = os.sysconf("SC_PAGE_SIZE")
RAYLET, RUNNER, WORKER, SERVER, ENGINE, STRANGER = 100, 110, 111, 112, 120, 900


class FakeProc:
    """A folder like /proc, for `psutil.PROCFS_PATH`. Memory in pages. A process starts after all with smaller ids."""

    def __init__(self, root: Path):
        self.root = root
        (root / "stat").write_text("btime 1000000000\n")

    def add(self, pid: int, parent: int, title: str, *, resident: int = 10, shared: int = 0) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 17, str(pid), *["0"] * 30]  # the 20th: when it started
        (folder / "stat").write_text(f"{pid} (a (b) c) {' '.join(fields)}")
        (folder / "cmdline").write_bytes(title.replace(" ", "\0").encode() + b"\0")
        (folder / "statm").write_text(f"999 {resident} {shared} 0 0 0 0")

    def remove(self, pid: int) -> None:
        for file in (self.root / str(pid)).iterdir():
            file.unlink()


class FakeNvml:
    """gpus: by GPU, bytes by process. lost: GPUs that do not answer."""

    def __init__(self, *gpus: dict[int, int | None]):
        self.gpus = list(gpus)
        self.lost: set[int] = set()

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        if handle in self.lost:
            raise RuntimeError("GPU is lost")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.gpus[handle].items()]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        used = GIB + sum(used or 0 for used in self.gpus[handle].values())
        return SimpleNamespace(used=used, free=100 * GIB - used)


def ray_run(root: Path) -> FakeProc:
    """The task runner is the process that watches; the engine's process is a child of its server; a stranger has a vLLM
    too."""
    root.mkdir()
    (root / "meminfo").write_text("not a process")
    fake = FakeProc(root)
    fake.add(1, 0, "/sbin/init")
    fake.add(RAYLET, 1, "/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", resident=20, shared=15)
    fake.add(RUNNER, RAYLET, "ray::TaskRunnerV1.run", resident=30, shared=5)
    fake.add(WORKER, RAYLET, "ray::WorkerDict.actor_rollout_update_actor", resident=1000, shared=40)
    fake.add(SERVER, RAYLET, "ray::vLLMHttpServer", resident=50, shared=5)
    fake.add(ENGINE, SERVER, "python -c spawn_main", resident=200, shared=10)
    fake.add(STRANGER, 1, "VLLM::EngineCore", resident=5000)
    return fake
