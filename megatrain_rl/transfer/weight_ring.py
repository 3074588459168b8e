"""WeightRing: layer weights on their way to compute, `depth` device slots ahead.

The ring is told the whole order of a sweep at once and keeps its slots full: acquire hands out the next block of that order,
release frees its slot and starts the copy of the block that comes `depth` places later. There is no index to drift.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_rl.host.store import WeightStore
from megatrain_rl.model.decoder import Block
from megatrain_rl.transfer.lanes import Lanes, Mark


@dataclass
class _Slot:
    flat: Tensor
    free: Mark | None = (
        None  # recorded after the last compute that read the slot; waited for by upload before refilling
    )
    ready: Mark | None = None  # recorded after the copy into the slot; waited for by compute before reading
    block: Block | None = None


class WeightRing:
    """depth: number of slots; numel, dtype: size of each."""

    def __init__(self, lanes: Lanes, device: torch.device, depth: int, numel: int, dtype: torch.dtype):
        self._lanes = lanes
        self._slots = [_Slot(torch.empty(numel, dtype=dtype, device=device)) for _ in range(depth)]
        self._empty: deque[_Slot] = deque(self._slots)
        self._loaded: deque[_Slot] = deque()
        self._order: deque[Block] = deque()
        self._store: WeightStore | None = None

    def begin(self, store: WeightStore, order: Iterable[Block]) -> None:
        """Start a sweep: its blocks, in the order they will be acquired, from `store`. What an aborted sweep left is dropped."""
        now = self._lanes.compute.record()
        for slot in self._loaded:
            slot.free = now
        self._empty = deque(self._slots)
        self._loaded.clear()
        self._store = store
        self._order = deque(order)
        self._prefetch()

    def acquire(self, block: Block) -> Tensor:
        """Flat weights of `block`, which must be next in the order; valid until `release`."""
        if not self._loaded:
            self._prefetch()
        slot = self._loaded[0]
        assert slot.block is block, f"ring holds {slot.block.name}, asked for {block.name}"
        self._lanes.compute.wait(slot.ready)
        return slot.flat[: block.layout.numel]

    def release(self, block: Block) -> None:
        """Compute has been given all its work on `block`; the slot may be refilled once that work is done."""
        slot = self._loaded.popleft()
        assert slot.block is block, f"ring holds {slot.block.name}, released {block.name}"
        slot.free = self._lanes.compute.record()
        slot.block = None
        self._empty.append(slot)
        self._prefetch()

    def _prefetch(self) -> None:
        while self._empty and self._order:
            slot, block = self._empty.popleft(), self._order.popleft()
            slot.ready = upload(self._lanes, self._store, block, slot.flat[: block.layout.numel], after=slot.free)
            slot.block = block
            self._loaded.append(slot)


def upload(lanes: Lanes, store: WeightStore, block: Block, out: Tensor, after: Mark | None) -> Mark:
    """Copy a block's host weights into `out` on the upload lane, not before `after`. The mark is recorded after the copy."""
    source = store.read(block)
    if after is not None:
        lanes.upload.wait(after)
    with lanes.upload:
        out.copy_(source, non_blocking=True)
    ready = lanes.upload.record()
    store.copied(block, ready)
    return ready
