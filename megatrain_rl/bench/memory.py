"""Memory of this process while something is measured: GPU by NVML and by torch's allocator, host by the kernel."""

import os

import psutil
import torch

from megatrain_rl.bench.record import Record
from megatrain_rl.watch.gpu import GpuProcesses
from megatrain_rl.watch.memory import Sampler

GIB = 2**30


class MemoryMeter:
    """Looks at this process every 100 ms, from its construction to `stop`.

    gpu_peak_bytes: the largest GPU memory of this process by NVML, CUDA context included; 0 without CUDA.
    rss_peak_bytes: the largest resident host memory, pinned pages included.
    """

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.gpu_peak_bytes = 0
        self.rss_peak_bytes = 0
        self._gpu = _gpu_in_use()
        self._process = psutil.Process()
        self._errors: list[Exception] = []
        self._sampler = Sampler(self._sample, failed=self._errors.append)
        self._sampler.start()

    def stop(self) -> None:
        """End it. RuntimeError for what went wrong meanwhile, and if NVML never saw this process: inside a container it
        may list other process ids."""
        self._sampler.stop()
        if self._errors:
            raise RuntimeError("sampling memory failed") from self._errors[0]
        self._sample()
        if self._gpu is not None and torch.cuda.is_initialized() and not self.gpu_peak_bytes:
            raise RuntimeError("NVML does not list this process: run outside the container's process namespace")

    def report(self, record: Record, case: str) -> None:
        """Stop, and put the peaks into the record."""
        self.stop()
        if torch.cuda.is_available():
            record.result(case, "trainer_process_peak_gib", self.gpu_peak_bytes / GIB, "GiB")
            record.result(case, "allocated_peak_gib", torch.cuda.max_memory_allocated() / GIB, "GiB")
            record.result(case, "reserved_peak_gib", torch.cuda.max_memory_reserved() / GIB, "GiB")
            record.say(f"{torch.cuda.memory_stats().get('num_alloc_retries', 0)} allocation retries")
        record.result(case, "host_rss_gib", self.rss_peak_bytes / GIB, "GiB")

    def _sample(self) -> None:
        self.rss_peak_bytes = max(self.rss_peak_bytes, self._process.memory_info().rss)
        if self._gpu is not None:
            [by_process] = self._gpu.used_bytes()
            self.gpu_peak_bytes = max(self.gpu_peak_bytes, by_process.get(os.getpid(), 0))


def _gpu_in_use() -> GpuProcesses | None:
    """torch's current GPU as NVML knows it; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    return GpuProcesses(uuid=f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}")
