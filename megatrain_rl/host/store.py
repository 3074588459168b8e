"""Stores of weights in host RAM, one flat region per block; a store says who may read a block when.

`HostStore` holds the policy. `MappedStore` is a frozen store that holds nothing: it reads a checkpoint's memory-mapped
files through a few pinned staging buffers. The weight ring and the trainer see both as a `WeightStore`.
"""

import threading
import time
from typing import Protocol

import torch
from torch import Tensor

from megatrain_rl.config import StreamConfig
from megatrain_rl.host.pinned import HostRegion
from megatrain_rl.model.decoder import Block, DecoderSpec
from megatrain_rl.model.hf_io import CheckpointReader
from megatrain_rl.ops.adamw import nearest_bfloat16


class HostFence(Protocol):
    """Something the host can wait for; a `transfer.lanes.Mark` is one."""

    def synchronize(self) -> None: ...


class WeightStore(Protocol):
    spec: DecoderSpec

    def read(self, block: Block) -> Tensor:
        """Flat host weights of `block` (layout numel,), once nobody writes them any more; valid until the reader's copy
        has been reported by `copied`."""

    def readable(self, block: Block) -> bool:
        """True when `read` would return at once."""

    def copied(self, block: Block, fence: HostFence) -> None:
        """Tell the store that the device copy of what `read` returned is complete once `fence` is."""

    def close(self) -> None: ...

    def rows(self, block: Block, name: str, index: Tensor, out: Tensor) -> None:
        """Gather rows `index` (n,) of the matrix `name` (V, H) of `block` into `out` (n, H) on the host."""


class HostStore:
    """Weights of every block in host RAM.

    A writer (the optimizer, a checkpoint) brackets its work with `begin_write` / `end_write`; `read` waits for that
    block only. If a writer failed, `read` raises its error instead of handing out half-written weights.

    waited_s: seconds that `read` has waited so far.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, *, pin: bool):
        self.spec = spec
        self.dtype = dtype
        self._regions = {b.name: HostRegion(b.layout.numel, dtype, pin=pin) for b in spec.blocks}
        self._readable = {b.name: threading.Event() for b in spec.blocks}
        self._error: BaseException | None = None
        self.waited_s = 0.0
        for event in self._readable.values():
            event.set()

    def read(self, block: Block) -> Tensor:
        if not self.readable(block):
            started = time.perf_counter()
            self._readable[block.name].wait()
            self.waited_s += time.perf_counter() - started
        if self._error is not None:
            raise RuntimeError(
                "the host optimizer failed; weights are incomplete, resume from a checkpoint"
            ) from self._error
        return self._regions[block.name].flat

    def readable(self, block: Block) -> bool:
        return self._readable[block.name].is_set()

    def copied(self, block: Block, fence: HostFence) -> None:
        """Nothing to do: a block is only written after the gradients computed from its device copy have landed."""

    def rows(self, block: Block, name: str, index: Tensor, out: Tensor) -> None:
        torch.index_select(block.layout.view(self.read(block), name), 0, index, out=out)

    def view(self, block: Block, name: str) -> Tensor:
        """One parameter, shaped, sharing memory; waits like `read`."""
        return block.layout.view(self.read(block), name)

    def begin_write(self, block: Block) -> Tensor:
        """Close `block` to readers and return its flat weights for writing."""
        self._readable[block.name].clear()
        return self._regions[block.name].flat

    def end_write(self, block: Block) -> None:
        self._readable[block.name].set()

    def fail(self, error: BaseException) -> None:
        """A writer failed: every present and future reader gets the error, of several the first."""
        self._error = self._error or error
        for event in self._readable.values():
            event.set()

    def recovered(self) -> None:
        """Every block has been written anew: readers need not hear of an earlier failure."""
        self._error = None

    def close(self) -> None:
        for region in self._regions.values():
            region.close()


class MappedStore:
    """Frozen weights read straight from a checkpoint directory; no anonymous host memory but `buffers` staging blocks.

    Speed is that of a host copy while the files sit in page cache, of the disk otherwise. The files must not be
    overwritten in place while the store lives (replacing or deleting them is harmless: the mapping keeps the old
    content).
    """

    def __init__(self, spec: DecoderSpec, reader: CheckpointReader, dtype: torch.dtype, *, pin: bool, buffers: int = 2):
        self.spec = spec
        self._reader = reader
        self._dtype = dtype
        largest = max(b.layout.numel for b in spec.blocks)
        self._staging = [HostRegion(largest, dtype, pin=pin) for _ in range(buffers)]
        self._fences: list[HostFence | None] = [None] * buffers
        self._next = 0
        self._holder: dict[str, int] = {}

    def read(self, block: Block) -> Tensor:
        i = self._next
        self._next = (i + 1) % len(self._staging)
        fence = self._fences[i]
        if fence is not None:  # the device may still be reading what this buffer held before
            fence.synchronize()
            self._fences[i] = None
        flat = self._staging[i].flat[: block.layout.numel]
        fill_from_checkpoint(block, flat, self._reader)
        self._holder[block.name] = i
        return flat

    def readable(self, block: Block) -> bool:
        return True

    def copied(self, block: Block, fence: HostFence) -> None:
        self._fences[self._holder[block.name]] = fence

    def rows(self, block: Block, name: str, index: Tensor, out: Tensor) -> None:
        copy_rounded(out, self._reader.tensor(block.names[name]).index_select(0, index))

    def close(self) -> None:
        for region in self._staging:
            region.close()


def frozen_store(spec: DecoderSpec, reader: CheckpointReader, config: StreamConfig, *, pin: bool) -> WeightStore:
    """The weights of a checkpoint, never written again, kept as `config.reference` says. pin: for copies to a GPU."""
    if config.reference == "mmap":
        return MappedStore(spec, reader, config.param_torch_dtype, pin=pin)
    store = HostStore(spec, config.param_torch_dtype, pin=pin)
    for block in spec.blocks:
        fill_from_checkpoint(block, store.begin_write(block), reader)
        store.end_write(block)
    return store


def fill_from_checkpoint(block: Block, flat: Tensor, reader: CheckpointReader) -> None:
    """Copy a block's parameters from `reader` into `flat`."""
    for name in block.layout.slots:
        copy_rounded(block.layout.view(flat, name), reader.tensor(block.names[name]))


def copy_rounded(place: Tensor, tensor: Tensor) -> None:
    """Copy into a store's weights, rounded like the optimizer rounds its masters.

    Policy and reference of one checkpoint therefore agree.
    """
    place.copy_(nearest_bfloat16(tensor) if place.dtype == torch.bfloat16 else tensor)
