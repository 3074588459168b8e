"""GPU memory by process, as NVML counts it.

NVML's errors are raised. memory.py goes on without the GPU that is lost, bench/memory.py fails.
"""

import contextlib
from typing import Any


class GpuProcesses:
    """The processes on some GPUs. Their CUDA contexts are counted; CUDA_VISIBLE_DEVICES plays no part.

    uuid: names one GPU; None takes every GPU of the machine. nvml: stands in for the module `pynvml` in tests.
    ValueError without that module; NVML's own errors where there is no driver or no such GPU.
    """

    def __init__(self, *, uuid: str | None = None, nvml: Any = None):
        self._nvml = nvml = _pynvml() if nvml is None else nvml
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

    def device_bytes(self) -> list[tuple[int, int]]:
        """Bytes in use on each GPU, whoever uses them, and bytes that are free."""
        found = [self._nvml.nvmlDeviceGetMemoryInfo(handle) for handle in self._handles]
        return [(memory.used, memory.free) for memory in found]

    def drop_lost(self) -> bool:
        """Forget the GPUs that no longer answer; whether any is left."""
        handles, self._handles = self._handles, []
        for handle in handles:
            with contextlib.suppress(Exception):
                self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                self._nvml.nvmlDeviceGetMemoryInfo(handle)
                self._handles.append(handle)
        return bool(self._handles)


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise ValueError("measuring GPU memory needs NVML: pip install nvidia-ml-py") from error
    return pynvml
