"""What a process uses: GPU memory by NVML, host memory by the kernel; and what it ran on."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch

SAMPLE_SECONDS = 0.1


class MemorySampler:
    """Samples this process every 100 ms from `start` to `stop`, on a thread.

    gpu_peak_bytes: largest GPU memory of this process by NVML, CUDA context included (0 without CUDA).
    rss_peak_bytes: largest resident host memory, pinned pages included.
    """

    def __init__(self):
        self.gpu_peak_bytes = 0
        self.rss_peak_bytes = 0
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._gpu = GpuProcesses(uuid=_current_gpu()) if torch.cuda.is_available() else None

    def start(self) -> "MemorySampler":
        self._thread.start()
        return self

    def stop(self) -> None:
        """End sampling; raises what went wrong in it, and if NVML never saw this process (it may report other process ids inside
        a container)."""
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise RuntimeError("sampling memory failed") from self._error
        self.sample()
        if self._gpu is not None and torch.cuda.is_initialized() and not self.gpu_peak_bytes:
            raise RuntimeError("NVML does not list this process: run outside the container's process namespace")

    def sample(self) -> None:
        self.rss_peak_bytes = max(self.rss_peak_bytes, rss_bytes())
        if self._gpu is not None:
            [by_process] = self._gpu.used_bytes()
            self.gpu_peak_bytes = max(self.gpu_peak_bytes, by_process.get(os.getpid(), 0))

    def _run(self) -> None:
        try:
            while not self._stop.wait(SAMPLE_SECONDS):
                self.sample()
        except Exception as error:  # raised by stop()
            self._error = error


def _current_gpu() -> str:
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


class GpuProcesses:
    """GPU memory by process, as NVML sees it: CUDA contexts are included, CUDA_VISIBLE_DEVICES plays no part.

    uuid: of one GPU; None: every GPU of the machine. nvml: stands in for the module `pynvml`.
    """

    def __init__(self, *, uuid: str | None = None, nvml: Any = None):
        if nvml is None:
            try:
                import pynvml as nvml
            except ImportError as error:
                raise ValueError("measuring GPU memory needs NVML: pip install nvidia-ml-py") from error
        self._nvml = nvml
        nvml.nvmlInit()
        if uuid is None:
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        else:
            self._handles = [nvml.nvmlDeviceGetHandleByUUID(uuid)]

    def used_bytes(self) -> list[dict[int, int]]:
        """Bytes by process id, for each GPU."""
        return [
            {p.pid: p.usedGpuMemory or 0 for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            for handle in self._handles
        ]

    def device_bytes(self) -> list[int]:
        """Bytes in use on each GPU, whoever uses them."""
        return [self._nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles]

    def drop_lost(self) -> bool:
        """Forget the GPUs that no longer answer; whether any is left."""
        handles, self._handles = self._handles, []
        for handle in handles:
            with contextlib.suppress(Exception):
                self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                self._nvml.nvmlDeviceGetMemoryInfo(handle)
                self._handles.append(handle)
        return bool(self._handles)


def rss_bytes() -> int:
    return resident_bytes(Path("/proc/self"))[0]


def resident_bytes(process: Path) -> tuple[int, int]:
    """Resident memory of a process (its folder in /proc), and the part of it that is shared or of files."""
    _, resident, shared, *_ = (process / "statm").read_text().split()
    page = os.sysconf("SC_PAGE_SIZE")
    return int(resident) * page, int(shared) * page


def environment() -> dict[str, Any]:
    """Hardware, versions and commit for a record."""
    import transformers

    from megatrain_rl import __version__

    versions = {"megatrain_rl": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    for name in ("verl", "vllm", "ray", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    hardware = {
        "cores": os.cpu_count(),
        "host_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        hardware |= {"gpu": properties.name, "gpu_gib": round(properties.total_memory / 2**30)}
        versions["cuda"] = torch.version.cuda
    versions["python"] = platform.python_version()
    run = subprocess.run(
        ["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    commit = os.environ.get("MEGATRAIN_COMMIT") or run.stdout.strip() or "unknown"
    return {"commit": commit, "hardware": hardware, "versions": versions, "date": time.strftime("%Y-%m-%d")}
