"""Peaks of this process while something is measured; what goes wrong meanwhile is an error at its end."""

import os
import time

import pytest
import torch

from megatrain_rl.bench import memory
from megatrain_rl.bench.memory import MemoryMeter


class Gpu:
    """In the place of NVML. by_process: bytes by process id, or the error it raises."""

    def __init__(self, by_process: dict[int, int] | Exception):
        self.by_process = by_process

    def used_bytes(self) -> list[dict[int, int]]:
        if isinstance(self.by_process, Exception):
            raise self.by_process
        return [self.by_process]


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    made = Gpu({})
    monkeypatch.setattr(memory, "_gpu_in_use", lambda: made)
    return made


def wait_until_sampled(meter: MemoryMeter, gpu_bytes: int) -> None:
    deadline = time.monotonic() + 60
    while meter.gpu_peak_bytes < gpu_bytes:
        assert time.monotonic() < deadline, "the thread does not sample"
        time.sleep(0.02)


def test_peaks_stay_when_memory_falls(gpu):
    meter = MemoryMeter()
    for now, peak in ((5, 5), (8, 8), (2, 8)):
        gpu.by_process = {os.getpid(): now, 1: 100}
        wait_until_sampled(meter, peak)
    meter.stop()
    assert meter.gpu_peak_bytes == 8 and meter.rss_peak_bytes > 50 * 2**20


def test_the_last_moment_counts(gpu):
    meter = MemoryMeter()
    meter._sampler.stop()
    gpu.by_process = {os.getpid(): 7}
    meter.stop()
    assert meter.gpu_peak_bytes == 7


def test_an_error_of_the_thread_is_raised_at_the_end(gpu):
    gpu.by_process = ValueError("GPU is lost")
    meter = MemoryMeter()
    meter._sampler._thread.join(60)
    with pytest.raises(RuntimeError, match="sampling") as raised:
        meter.stop()
    assert str(raised.value.__cause__) == "GPU is lost"


@pytest.mark.parametrize("initialized", [True, False])
def test_a_process_that_nvml_does_not_list(gpu, monkeypatch, initialized):
    """An error if the process is on the GPU at all."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    gpu.by_process = {70000: 5}
    meter = MemoryMeter()
    if initialized:
        with pytest.raises(RuntimeError, match="NVML"):
            meter.stop()
    else:
        meter.stop()
        assert meter.gpu_peak_bytes == 0
