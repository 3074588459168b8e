"""DeviceArena: a piece of device memory with an allocator of its own, and the reservation of the rest.

Left alone, torch's caching allocator asks the driver for a segment here and a segment there, and what two phases of a
sweep need does not fit into each other's pieces: more is reserved than is ever allocated. So whatever outlives a phase
is allocated in an arena, and what is left of the budget is reserved in one segment, from which the phases cut what they
need and to which they give all of it back. Nothing here depends on expandable segments, which others in the process
switch.
"""

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

log = logging.getLogger(__name__)

# Caps of the owners that live: the allocator knows one cap for the process.
_caps: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


class DeviceArena:
    """One segment of `arena_bytes` in a memory pool of its own. A no-op on a CPU."""

    def __init__(self, device: torch.device, arena_bytes: int):
        self._device = device
        self._pool: torch.cuda.MemPool | None = None
        if device.type == "cuda" and arena_bytes:
            with torch.cuda.device(device):  # a pool belongs to the device that is current when it is made
                self._device = torch.device("cuda", torch.cuda.current_device())
                self._pool = torch.cuda.MemPool()
            with self.allocating():
                # freed at once; the pool keeps the segment
                torch.empty(arena_bytes, dtype=torch.uint8, device=self._device)

    def allocating(self) -> AbstractContextManager:
        """A context in which this thread's allocations come from the arena."""
        if self._pool is None:
            return contextlib.nullcontext()
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def close(self) -> None:
        self._pool = None


class DeviceReservation:
    """One segment of `reserved_bytes` taken from the driver, or a free one of that size. A no-op on a CPU.

    It stays until `close`, also when others empty the cache (`torch.cuda.empty_cache` gives back only what is wholly
    free): whole at first, and after `open` by a small piece of it that is never freed while everything else is there to
    be cut. With expandable segments, which give back page by page, only the piece stays once it is open.
    """

    # so large that the allocator does not cut it from a segment of small tensors
    _KEPT_BYTES = 2 << 20

    def __init__(self, device: torch.device, reserved_bytes: int):
        self._device = device
        self._whole = self._take(max(reserved_bytes, self._KEPT_BYTES)) if device.type == "cuda" else None
        self._kept: torch.Tensor | None = None

    def open(self) -> None:
        """Let others cut from the segment. Called on the stream that it was taken on; a second call does nothing."""
        if self._whole is None:
            return
        begin, end = self._whole.data_ptr(), self._whole.data_ptr() + self._whole.nbytes
        self._whole = None
        elsewhere: list[torch.Tensor] = []  # free pieces of other segments fit better
        while len(elsewhere) < 256:
            piece = self._take(self._KEPT_BYTES)
            if begin <= piece.data_ptr() < end:
                self._kept = piece
                return
            elsewhere.append(piece)
        log.warning(
            "the reserved GPU memory is kept by what is cut from it alone: %d pieces were free elsewhere",
            len(elsewhere),
        )

    def close(self) -> None:
        self._whole = self._kept = None

    def _take(self, wanted_bytes: int) -> torch.Tensor:
        return torch.empty(wanted_bytes, dtype=torch.uint8, device=self._device)


@contextlib.contextmanager
def within_budget(device: torch.device, wanted_bytes: int) -> Iterator[None]:
    """A context in which an owner takes all of its `wanted_bytes`.

    Running out of memory there is a RuntimeError that names the budget.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        held, (free, _) = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)
        raise RuntimeError(
            f"no {wanted_bytes / 1e9:.2f} GB of GPU memory to reserve: the card has {free / 1e9:.2f} GB free, and this process "
            f"already holds {held / 1e9:.2f} GB, which gpu_budget_gb covers too; free what the process holds beside the trainer, "
            "leave the card more room, or change gpu_budget_gb"
        ) from error


def release_cached_memory(device: torch.device) -> None:
    """Give the driver back what this process has cached, and what is dead but not collected yet.

    Without it the workspaces of a new owner would be cut from a large segment that an earlier one left, and hold all of
    it.
    """
    if device.type == "cuda":
        gc.collect()
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def cap_device_memory(device: torch.device, owner: object, cap_bytes: int | None) -> None:
    """Let the allocator reserve `cap_bytes` for `owner` and no more; None lifts its cap.

    An allocation over it is an error here, not a surprise for the engine that shares the card. Several owners in a
    process may use the sum of their caps.
    """
    if device.type != "cuda":
        return
    if cap_bytes is None:
        _caps.pop(owner, None)
    else:
        _caps[owner] = cap_bytes
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = sum(_caps.values()) / total if _caps else 1.0
    torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), device)
