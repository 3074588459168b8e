"""GradSlabPool: gradients leave the device through K staging slabs.

A layer's fp32 sum is cast slab by slab and each slab leaves on the download lane, so the sum buffer is free for the next layer
as soon as the last cast is done, not when the last byte has crossed. One worker thread waits for landings and reports them;
what goes wrong there is raised at the caller's next push or drain.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_rl.model.decoder import Block
from megatrain_rl.transfer.lanes import Lanes, Mark


@dataclass
class _Slab:
    flat: Tensor
    free: Mark | None = (
        None  # recorded after the copy out of the slab; waited for by compute before the next cast into it
    )


class GradSlabPool:
    """num_slabs slabs of `slab_numel` elements of `dtype` on `device`.

    on_landed(block): called on the worker thread when a pushed gradient is complete in host memory.
    """

    def __init__(
        self,
        lanes: Lanes,
        device: torch.device,
        *,
        num_slabs: int,
        slab_numel: int,
        dtype: torch.dtype,
        on_landed: Callable[[Block], None],
    ):
        self._lanes = lanes
        self._slabs = [_Slab(torch.empty(slab_numel, dtype=dtype, device=device)) for _ in range(num_slabs)]
        self._next = 0
        self._on_landed = on_landed
        self._error: BaseException | None = None
        self._landings: queue.Queue[tuple[Block, Mark] | None] = queue.Queue()
        self._worker = threading.Thread(target=self._report_landings, name="grad-landings", daemon=True)
        self._worker.start()

    def push(self, block: Block, grad_device: Tensor, grad_host: Tensor) -> None:
        """Send `grad_device` (numel,) fp32 to `grad_host` (numel,). `grad_device` may be reused by compute at once."""
        self._raise_worker_error()
        numel = grad_device.numel()
        for start in range(0, numel, self._slabs[0].flat.numel()):
            slab = self._take()
            end = min(start + slab.flat.numel(), numel)
            part = slab.flat[: end - start]
            part.copy_(grad_device[start:end])
            self._lanes.download.wait(self._lanes.compute.record())
            with self._lanes.download:
                grad_host[start:end].copy_(part, non_blocking=True)
            slab.free = self._lanes.download.record()
        self._landings.put((block, self._lanes.download.record()))

    def pull(self, grad_host: Tensor, grad_device: Tensor) -> None:
        """The way back: fill `grad_device` (numel,) fp32 from a landed gradient, to be added to."""
        self._raise_worker_error()
        numel = grad_device.numel()
        for start in range(0, numel, self._slabs[0].flat.numel()):
            slab = self._take()
            end = min(start + slab.flat.numel(), numel)
            part = slab.flat[: end - start]
            # after the slab's last use on compute as well as its last copy out
            self._lanes.upload.wait(self._lanes.compute.record())
            with self._lanes.upload:
                part.copy_(grad_host[start:end], non_blocking=True)
            self._lanes.compute.wait(self._lanes.upload.record())
            grad_device[start:end].copy_(part)
            slab.free = self._lanes.compute.record()

    def drain(self) -> None:
        """Wait until everything pushed has landed and been reported; raise what the worker met."""
        self._landings.join()
        self._raise_worker_error()

    def close(self) -> None:
        self._landings.put(None)
        self._worker.join()

    def _take(self) -> _Slab:
        slab = self._slabs[self._next]
        self._next = (self._next + 1) % len(self._slabs)
        if slab.free is not None:
            self._lanes.compute.wait(slab.free)
        return slab

    def _report_landings(self) -> None:
        while True:
            item = self._landings.get()
            try:
                if item is None:
                    return
                block, landed = item
                landed.synchronize()
                self._on_landed(block)
            except BaseException as error:  # raised on the caller's thread instead
                self._error = error
            finally:
                self._landings.task_done()

    def _raise_worker_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError("a gradient did not land in host memory") from error
