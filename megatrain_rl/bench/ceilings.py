"""The best that this machine can do (matrix product, link, host memory), measured in the run that is compared with it.

Times are wall times of a batch of equal operations between two synchronisations, so launches cost nothing. On a CPU the
link is a copy in memory: its figure has no meaning and lets the commands run.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatrain_rl.bench.record import Record
from megatrain_rl.host.machine import usable_cores
from megatrain_rl.host.pinned import HostRegion
from megatrain_rl.transfer.lanes import Lanes

MATMUL_SIZE = 8192
MATMUL_SECONDS = 3.0
LINK_BYTES = 1 << 30
HOST_COPY_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The ceilings; GB/s are 1e9 bytes a second.

    matmul_tflops: bf16 TFLOP/s of a square product of random numbers, kept up for seconds. matmul_burst_tflops: the
    same in the best fiftieth of a second.
    h2d_gb_s, d2h_gb_s, both_gb_s: over the link from pinned memory: up, down, and both ways together.
    host_copy_gb_s, host_update_gb_s: read plus written on every core, by a copy in host memory and by an update in
    place. (A copy reads what it is about to overwrite too, which its figure does not count.)
    """

    matmul_tflops: float
    matmul_burst_tflops: float
    h2d_gb_s: float
    d2h_gb_s: float
    both_gb_s: float
    host_copy_gb_s: float
    host_update_gb_s: float


def measure_ceilings(device: torch.device, record: Record, *, quick: bool) -> Ceilings:
    """Measure all of them and say a line of each; no memory is left behind."""
    matmul, burst = matmul_tflops(device, record, quick=quick)
    link = LinkProbe(device, quick=quick)
    h2d, d2h, both = link.h2d(), link.d2h(), link.both()
    link.close()
    record.say(f"link, pinned memory: H2D {h2d:.1f}, D2H {d2h:.1f}, both at once {both:.1f} GB/s")
    return Ceilings(
        matmul_tflops=matmul,
        matmul_burst_tflops=burst,
        h2d_gb_s=h2d,
        d2h_gb_s=d2h,
        both_gb_s=both,
        host_copy_gb_s=host_copy_gb_s(record, quick=quick),
        host_update_gb_s=host_update_gb_s(record, quick=quick),
    )


def matmul_tflops(device: torch.device, record: Record, *, quick: bool) -> tuple[float, float]:
    """(sustained, burst) TFLOP/s of bf16 (size x size) products.

    The factors are standard normal numbers; zeros would draw less power and run faster. A card at its power limit
    lowers its clock after a fraction of a second, and a training step lasts seconds: sustained is the median of the
    last two thirds of MATMUL_SECONDS of nothing but products, burst the best reading of all.
    """
    tiny = quick or device.type == "cpu"
    size = 256 if tiny else MATMUL_SIZE
    readings = [2 * size**3 / s / 1e12 for s in _matmul_seconds(device, size, 0.05 if tiny else MATMUL_SECONDS)]
    release_device_memory(device)
    late = readings[len(readings) // 3 :]
    sustained, burst = statistics.median(late), max(readings)
    record.say(
        f"bf16 matmul {size}^3, random data: {sustained:.4g} TFLOP/s sustained (median of the last {len(late)} of {len(readings)} readings, "
        f"{min(late):.4g} to {max(late):.4g}), {burst:.4g} in the best reading"
    )
    return sustained, burst


def _matmul_seconds(device: torch.device, size: int, duration: float) -> list[float]:
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    each = 2 if device.type == "cpu" else 15
    timed(device, lambda: torch.mm(a, b, out=out), each)
    seconds: list[float] = []
    end = time.perf_counter() + duration
    while len(seconds) < 3 or time.perf_counter() < end:
        seconds.append(timed(device, lambda: torch.mm(a, b, out=out), each))
    return seconds


def host_copy_gb_s(record: Record, *, quick: bool) -> float:
    """GB/s read plus written by `copy_` of one fp32 tensor on every usable core, the median of some readings. Both
    tensors lie in memory like the trainer's, on huge pages where the system has them."""
    source, target = (_host_tensor(quick) for _ in range(2))
    return _host_gb_s("copy", lambda: target.flat.copy_(source.flat), source.flat.nbytes, record)


def host_update_gb_s(record: Record, *, quick: bool) -> float:
    """GB/s read plus written by `mul_` of one fp32 tensor on every usable core, the median of some readings. It is the
    traffic of an optimizer, which has read what it writes."""
    target = _host_tensor(quick)
    return _host_gb_s("update in place", lambda: target.flat.mul_(1.0), target.flat.nbytes, record)


def _host_tensor(quick: bool) -> HostRegion:
    region = HostRegion((1 << 22 if quick else HOST_COPY_BYTES) // 4, torch.float32, pin=False)
    region.flat.fill_(1.0)
    return region


def _host_gb_s(name: str, operation: Callable[[], object], num_bytes: int, record: Record, readings: int = 7) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        seconds = [timed(torch.device("cpu"), operation, 1) for _ in range(readings + 1)][1:]
    finally:
        torch.set_num_threads(threads)
    figures = sorted(2 * num_bytes / s / 1e9 for s in seconds)
    median = statistics.median(figures)
    record.say(
        f"host {name} of {num_bytes / 2**30:.2f} GiB, {usable_cores()} threads: {median:.1f} GB/s read plus written, median of "
        f"{readings} ({figures[0]:.1f} to {figures[-1]:.1f})"
    )
    return median


class LinkProbe:
    """Two pinned host buffers and two device buffers. Each figure is in GB/s, the median of five readings."""

    def __init__(self, device: torch.device, *, quick: bool):
        numel = 1 << 20 if quick or device.type == "cpu" else LINK_BYTES
        pin = device.type == "cuda"
        self._device = device
        self._lanes = Lanes.on(device)
        self._up_host, self._down_host = (HostRegion(numel, torch.uint8, pin=pin) for _ in range(2))
        self._up_device, self._down_device = (torch.zeros(numel, dtype=torch.uint8, device=device) for _ in range(2))

    def h2d(self) -> float:
        return self._gb_s(up=True, down=False)

    def d2h(self) -> float:
        return self._gb_s(up=False, down=True)

    def both(self) -> float:
        """Copies in both directions at once; the sum of the two."""
        return self._gb_s(up=True, down=True)

    def close(self) -> None:
        self._up_host.close()
        self._down_host.close()
        del self._up_device, self._down_device
        release_device_memory(self._device)

    def _gb_s(self, *, up: bool, down: bool) -> float:
        moved = self._up_host.flat.nbytes * (up + down)

        def copy() -> None:
            if up:
                with self._lanes.upload:
                    self._up_device.copy_(self._up_host.flat, non_blocking=True)
            if down:
                with self._lanes.download:
                    self._down_host.flat.copy_(self._down_device, non_blocking=True)

        seconds = [timed(self._device, copy, 4) for _ in range(6)][1:]
        return moved / statistics.median(seconds) / 1e9


def timed(device: torch.device, operation: Callable[[], object], repeats: int) -> float:
    """Seconds of one `operation`, measured over `repeats`."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        operation()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_device_memory(device: torch.device) -> None:
    """Give freed blocks back to the driver: what is measured next must not inherit them."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
