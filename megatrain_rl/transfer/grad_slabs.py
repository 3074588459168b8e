"""GradSlabPool: gradients leave the device through K staging slabs.

A layer's fp32 sum is cast slab by slab and each slab leaves on the download lane, so the sum buffer is free for the
next layer as soon as the last cast is done, not when the last byte has crossed. One worker thread waits for landings
and reports them; what goes wrong there is raised at the caller's next push or drain.

A sum that fetches what earlier sweeps left on the host and leaves again is rounded each time. To the nearest bf16,
parts smaller than half a unit in the last place would all be lost once the sum has grown: 6 % of the norm after 400
sweeps. Such sums are rounded up or down at random instead, so that the mean is right: what one rounding loses another
gives. The random bits depend on a seed alone, so a run repeats to the bit.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_rl.host.pinned import HostRegion
from megatrain_rl.model.decoder import Block
from megatrain_rl.transfer.lanes import Lanes, Mark

# Elements rounded at once: bounds the random bits and what testing for infinity takes to some 30 MB.
_ROUNDED_AT_ONCE = 1 << 21


@dataclass
class _Slab:
    flat: Tensor
    # recorded after the last use: on compute after its allocation or after it was added to a sum, on download after the
    # copy out of it. Waited for by whoever writes the slab next.
    free: Mark


@dataclass(frozen=True)
class _Landing:
    """A gradient on its way to host memory. norm_device: kept alive until its copy has landed."""

    block: Block
    norm_device: Tensor
    norm_host: Tensor
    landed: Mark


class GradSlabPool:
    """num_slabs slabs of `slab_numel` elements of `dtype` on `device`.

    on_landed(block, norm): called on the worker thread when a pushed gradient is complete in host memory; norm is its
        L2 norm, taken in fp32 before the cast.
    """

    def __init__(
        self,
        lanes: Lanes,
        device: torch.device,
        *,
        num_slabs: int,
        slab_numel: int,
        dtype: torch.dtype,
        on_landed: Callable[[Block, float], None],
    ):
        self._lanes = lanes
        flats = [torch.empty(slab_numel, dtype=dtype, device=device) for _ in range(num_slabs)]
        allocated = lanes.compute.record()
        self._slabs = [_Slab(flat, free=allocated) for flat in flats]
        self._slab_numel = slab_numel
        self._dtype = dtype
        self._random = torch.Generator(device)
        self._next = 0
        self._ahead: deque[tuple[_Slab, Mark]] = deque()
        self._on_landed = on_landed
        # A norm is read long before the ring of places comes round: the slabs it shares the lane with are far fewer.
        self._norms = HostRegion(4096, torch.float32, pin=device.type == "cuda")
        self._num_pushed = 0
        self._error: BaseException | None = None
        self._landings: queue.Queue[_Landing | None] = queue.Queue()
        self._worker = threading.Thread(target=self._report_landings, name="grad-landings", daemon=True)
        self._worker.start()

    def push(self, block: Block, grad_device: Tensor, grad_host: Tensor, *, seed: int | None = None) -> None:
        """Send `grad_device` (numel,) fp32 to `grad_host` (numel,). `grad_device` may be reused by compute at once.

        seed: round at random with this seed, in `grad_device` itself; None rounds to the nearest.
        """
        self._raise_worker_error()
        assert not self._ahead, "an earlier gradient was prefetched and never added"
        norm_device = torch.linalg.vector_norm(grad_device)
        if seed is not None and self._dtype == torch.bfloat16:
            round_at_random_(grad_device, self._random.manual_seed(seed))
        for part in self._parts(grad_device.numel()):
            slab = self._take()
            self._lanes.compute.wait(slab.free)
            staged = slab.flat[: part.stop - part.start]
            staged.copy_(grad_device[part])
            self._lanes.download.wait(self._lanes.compute.record())
            with self._lanes.download:
                grad_host[part].copy_(staged, non_blocking=True)
            slab.free = self._lanes.download.record()
        place = self._num_pushed % self._norms.flat.numel()
        self._num_pushed += 1
        norm_host = self._norms.flat[place : place + 1]
        with self._lanes.download:  # after the last slab's copy, so after compute took the norm
            norm_host.copy_(norm_device.view(1), non_blocking=True)
        self._landings.put(_Landing(block, norm_device, norm_host, self._lanes.download.record()))

    def prefetch_earlier(self, grad_host: Tensor) -> None:
        """Start the way back of a landed gradient, as much of it as the slabs hold.

        `add_earlier` must follow, before any push.
        """
        parts = list(self._parts(grad_host.numel()))
        self._ahead.extend(self._fetch(grad_host[part]) for part in parts[: len(self._slabs)])

    def add_earlier(self, grad_host: Tensor, grad_device: Tensor) -> None:
        """Add a landed gradient (numel,) to the fp32 sum `grad_device` (numel,)."""
        self._raise_worker_error()
        for part in self._parts(grad_device.numel()):
            slab, arrived = self._ahead.popleft() if self._ahead else self._fetch(grad_host[part])
            self._lanes.compute.wait(arrived)
            grad_device[part].add_(slab.flat[: part.stop - part.start])
            slab.free = self._lanes.compute.record()

    def drain(self) -> None:
        """Wait until everything pushed has landed and been reported; raise what the worker met."""
        self._landings.join()
        while self._ahead:  # left by a sweep that failed in between
            slab, arrived = self._ahead.popleft()
            slab.free = arrived
        self._raise_worker_error()

    def close(self) -> None:
        self._landings.put(None)
        self._worker.join()
        self._slabs.clear()
        self._norms.close()

    def _parts(self, numel: int) -> Iterator[slice]:
        for start in range(0, numel, self._slab_numel):
            yield slice(start, min(start + self._slab_numel, numel))

    def _take(self) -> _Slab:
        slab = self._slabs[self._next]
        self._next = (self._next + 1) % len(self._slabs)
        return slab

    def _fetch(self, source: Tensor) -> tuple[_Slab, Mark]:
        slab = self._take()
        self._lanes.upload.wait(slab.free)
        with self._lanes.upload:
            slab.flat[: source.numel()].copy_(source, non_blocking=True)
        return slab, self._lanes.upload.record()

    def _report_landings(self) -> None:
        while True:
            landing = self._landings.get()
            try:
                if landing is None:
                    return
                landing.landed.synchronize()
                self._on_landed(landing.block, landing.norm_host.item())
            except BaseException as error:  # raised on the caller's thread instead
                self._error = error
            finally:
                del landing
                self._landings.task_done()

    def _raise_worker_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError("a gradient did not land in host memory") from error


def round_at_random_(values: Tensor, random: torch.Generator) -> None:
    """Round fp32 `values` (n,) in place to values that bf16 holds, of the two neighbours the nearer one more often: the
    mean is the value. What is not finite stays so."""
    for part in values.split(_ROUNDED_AT_ONCE):
        low_bits = torch.randint(1 << 16, part.shape, dtype=torch.int32, device=part.device, generator=random)
        low_bits.masked_fill_(~part.isfinite(), 0)  # a NaN of all ones would become a zero
        part.view(torch.int32).add_(low_bits).bitwise_and_(-(1 << 16))
