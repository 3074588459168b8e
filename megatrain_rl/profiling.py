"""What a process uses: GPU memory by NVML, host memory by the kernel; and what it ran on."""

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
        self._gpu = _NvmlProcess() if torch.cuda.is_available() else None

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
            self.gpu_peak_bytes = max(self.gpu_peak_bytes, self._gpu.used_bytes())

    def _run(self) -> None:
        try:
            while not self._stop.wait(SAMPLE_SECONDS):
                self.sample()
        except Exception as error:  # raised by stop()
            self._error = error


class _NvmlProcess:
    def __init__(self):
        try:
            import pynvml
        except ImportError as error:
            raise ValueError("measuring GPU memory needs nvidia-ml-py: pip install megatrain-rl[bench]") from error
        self._nvml = pynvml
        pynvml.nvmlInit()
        index = torch.cuda.current_device()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")

    def used_bytes(self) -> int:
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid():
                return process.usedGpuMemory or 0
        return 0


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def environment() -> dict[str, Any]:
    """Hardware, versions and commit for a record."""
    import transformers

    from megatrain_rl import __version__

    versions = {"megatrain_rl": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
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
