"""WeightRing: layer weights on their way to compute, `depth` device slots ahead.

The ring is told the whole order of a sweep at once and keeps its slots full: acquire hands out the next block of that
order, release frees its slot and starts the copy of the block that comes `depth` places later. There is no index to
drift.

A block that the host optimizer still holds is not waited for ahead of time: the caller would stop giving compute the
work that is ready. Its copy starts at the next release or, at the latest, when it is acquired.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_rl.host.store import WeightStore
from megatrain_rl.model.decoder import Block
from megatrain_rl.transfer.lanes import Lanes, Mark


@dataclass(frozen=True)
class _Empty:
    """A slot to fill."""

    flat: Tensor
    free: Mark  # recorded on compute after what used the memory before; waited for by upload before refilling


@dataclass(frozen=True)
class _Loaded:
    """A slot that holds `block`, or will once its copy is done."""

    flat: Tensor
    block: Block
    ready: Mark  # recorded after the copy into the slot; waited for by compute before reading


class WeightRing:
    """depth: number of slots; numel, dtype: size of each. Slots exist from `begin` to `park`."""

    def __init__(self, lanes: Lanes, device: torch.device, depth: int, numel: int, dtype: torch.dtype):
        self._lanes = lanes
        self._device = device
        self._depth = depth
        self._numel = numel
        self._dtype = dtype
        self._empty: deque[_Empty] = deque()
        self._loaded: deque[_Loaded] = deque()
        self._order: deque[Block] = deque()
        self._store: WeightStore  # the one that the order is read from; set by `begin`

    def begin(self, store: WeightStore, order: Iterable[Block]) -> None:
        """Start a sweep: its blocks, in the order they will be acquired, from `store`."""
        assert not self._order and not self._loaded, "the sweep before was neither parked nor abandoned"
        for _ in range(self._depth - len(self._empty)):
            flat = torch.empty(self._numel, dtype=self._dtype, device=self._device)
            # recorded after the allocation, which may itself be work for compute (deterministic mode fills what it
            # hands out)
            self._empty.append(_Empty(flat, free=self._lanes.compute.record()))
        self._store = store
        self._order = deque(order)
        self._prefetch()

    def acquire(self, block: Block) -> Tensor:
        """Flat weights of `block`, which must be next in the order; valid until `release`."""
        self._prefetch()
        if not self._loaded:
            self._load_next()
        slot = self._loaded[0]
        assert slot.block is block, f"ring holds {slot.block.name}, asked for {block.name}"
        self._lanes.compute.wait(slot.ready)
        return slot.flat[: block.layout.numel]

    def release(self, block: Block) -> None:
        """Compute has been given all its work on `block`; the slot may be refilled once that work is done."""
        slot = self._loaded.popleft()
        assert slot.block is block, f"ring holds {slot.block.name}, released {block.name}"
        self._empty.append(_Empty(slot.flat, free=self._lanes.compute.record()))
        self._prefetch()

    def park(self) -> None:
        """The order is through: give the slots' memory back until the next `begin`."""
        assert not self._order and not self._loaded, "a block was announced and not used"
        self._empty.clear()

    def abandon(self) -> None:
        """The sweep ends here: drop what was announced and give the memory back. The lanes must be at rest."""
        self._order.clear()
        self._loaded.clear()
        self._empty.clear()

    def _prefetch(self) -> None:
        while self._empty and self._order and self._store.readable(self._order[0]):
            self._load_next()

    def _load_next(self) -> None:
        slot, block = self._empty.popleft(), self._order.popleft()
        ready = upload(self._lanes, self._store, block, slot.flat[: block.layout.numel], after=slot.free)
        self._loaded.append(_Loaded(slot.flat, block, ready))


def upload(lanes: Lanes, store: WeightStore, block: Block, out: Tensor, *, after: Mark) -> Mark:
    """Copy a block's host weights into `out` on the upload lane, not before `after`; the mark follows the copy."""
    source = store.read(block)
    lanes.upload.wait(after)
    with lanes.upload:
        out.copy_(source, non_blocking=True)
    ready = lanes.upload.record()
    store.copied(block, ready)
    return ready
