"""DeviceArena: a piece of device memory with an allocator of its own, and the reservation of the rest.

Left alone, torch's caching allocator asks the driver for a segment here and a segment there, and what two phases of a sweep need does not
fit into each other's pieces: more is reserved than is ever allocated. So whatever outlives a phase is allocated in an arena, and what is
left of the budget is reserved in one segment, from which the phases cut what they need and to which they give all of it back. Nothing here
depends on expandable segments, which others in the process switch.
"""

import contextlib
from contextlib import AbstractContextManager

import torch

# What the allocator rounds sizes and segments to, several times over.
_ROUNDING_BYTES = 16 << 20


class DeviceArena:
    """One segment of a memory pool of its own. A no-op on a CPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: torch.cuda.MemPool | None = None
        self._bytes = 0

    def grow_to(self, numel_bytes: int) -> None:
        """Room for this much. Nothing allocated here may be alive."""
        if self._device.type != "cuda" or numel_bytes <= self._bytes:
            return
        self._pool = None
        torch.cuda.empty_cache()  # the old segment goes before the new one comes
        self._pool = torch.cuda.MemPool()
        self._bytes = numel_bytes
        with self.allocating():
            torch.empty(
                numel_bytes + _ROUNDING_BYTES, dtype=torch.uint8, device=self._device
            )  # let go: the pool keeps it

    def allocating(self) -> AbstractContextManager:
        """Within it this thread's allocations come from the arena."""
        if self._pool is None:
            return contextlib.nullcontext()
        return torch.cuda.use_mem_pool(self._pool, self._device)


def cap_device_memory(device: torch.device, cap_bytes: int | None) -> None:
    """The allocator may reserve so much and no more (None: all there is): an allocation over it is an error here, not a surprise for the
    engine that shares the card."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if cap_bytes is None else min(1.0, cap_bytes / total), device)


def reserve_device_memory(device: torch.device, reserved_bytes: int, cap_bytes: int) -> None:
    """Make sure that the process has reserved this much, what is missing in one segment. Cheap when it has."""
    if device.type != "cuda":
        return
    wanted = min(reserved_bytes + 2 * _ROUNDING_BYTES, cap_bytes - _ROUNDING_BYTES)
    if torch.cuda.memory_reserved(device) >= wanted:
        return
    torch.cuda.empty_cache()  # pieces too small to be of use would count against the cap
    missing = wanted - torch.cuda.memory_reserved(device)
    torch.empty(missing, dtype=torch.uint8, device=device)  # let go at once: the cache keeps the segment
