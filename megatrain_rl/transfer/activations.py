"""ActivationStore: hidden states between layers, on the host or kept on the device, by (slot, pack).

A slot is a place for one (T_total, H) tensor of a sweep in pinned host RAM; a pack owns its rows of every slot. `put`
sends a pack's hidden states out, `prefetch` starts bringing them back, `take` hands them over. Device memory therefore
holds a few packs, not the batch; it is an arena of its own (`hold`), since these tensors outlive the layer or head that
made them and would otherwise lie scattered through the memory that the next one needs in one piece.

Shapes: T tokens of a pack, H hidden size.
"""

from collections import deque

import torch
from torch import Tensor

from megatrain_rl.host.pinned import HostRegion
from megatrain_rl.transfer.arena import DeviceArena
from megatrain_rl.transfer.lanes import Lanes, Mark

# Smaller tensors come from other segments of a pool than larger ones: hidden states are at least this large on the
# device.
_LEAST_BYTES = (1 << 20) + 512
# Outgoing tensors kept alive until their copy is done. Two let the copy of one overlap the compute of the next.
_OUTGOING = 2


class ActivationStore:
    """arena_bytes: device memory for hidden states that wait, arrive or leave."""

    def __init__(
        self, lanes: Lanes, device: torch.device, hidden_size: int, dtype: torch.dtype, *, arena_bytes: int, pin: bool
    ):
        self._lanes = lanes
        self._device = device
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._pin = pin
        self._region = HostRegion(0, dtype, pin=False)
        self._arena = DeviceArena(device, arena_bytes)
        self._buffer_numel = 0
        self._starts: list[int] = [0]
        # recorded after the copy out; waited for by fetch before reading back
        self._landed: dict[tuple[int, int], Mark] = {}
        self._arriving: dict[tuple[int, int], tuple[Tensor, Mark]] = {}
        self._outgoing: deque[tuple[Tensor, Mark]] = deque()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's hidden state."""
        return self._hidden_size * self._dtype.itemsize

    def begin(self, num_slots: int, pack_tokens: list[int]) -> None:
        """Start a sweep of packs of these sizes with `num_slots` slots.

        The host region grows when it must, never shrinks; the old one is given back first, so the two never exist
        together.
        """
        self._lanes.synchronize()
        self._landed.clear()
        self._arriving.clear()
        self._outgoing.clear()
        self._buffer_numel = buffer_bytes(max(pack_tokens) * self.bytes_per_token) // self._dtype.itemsize
        self._starts = [0]
        for tokens in pack_tokens:
            self._starts.append(self._starts[-1] + tokens)
        numel = num_slots * self._starts[-1] * self._hidden_size
        if numel > self._region.flat.numel():
            self._region.close()
            self._region = HostRegion(numel, self._dtype, pin=self._pin)

    def host_TH(self, slot: int, pack: int) -> Tensor:
        """The host rows (T, H) of (slot, pack); a producer on the host writes them and then calls `filled`."""
        total = self._starts[-1]
        start, end = slot * total + self._starts[pack], slot * total + self._starts[pack + 1]
        return self._region.flat[start * self._hidden_size : end * self._hidden_size].view(-1, self._hidden_size)

    def filled(self, slot: int, pack: int) -> None:
        self._landed[slot, pack] = Mark(None)

    def hold(self, hidden_TH: Tensor) -> Tensor:
        """Returns `hidden_TH` copied into the arena (on a CPU as it is)."""
        return self._buffer_TH(hidden_TH.shape[0]).copy_(hidden_TH) if hidden_TH.is_cuda else hidden_TH

    def _buffer_TH(self, tokens: int) -> Tensor:
        """Device memory for hidden states (T, H). All of a sweep's are of one size: any fits where another was."""
        with self._arena.allocating():
            flat = torch.empty(self._buffer_numel, dtype=self._dtype, device=self._device)
        return flat[: tokens * self._hidden_size].view(tokens, self._hidden_size)

    def put(self, slot: int, pack: int, hidden_TH: Tensor) -> None:
        """Send `hidden_TH`, which is in the arena, out.

        It must not be written in place afterwards; it is kept alive until it has left.
        """
        lanes = self._lanes
        if len(self._outgoing) >= _OUTGOING:
            tensor, landed = self._outgoing.popleft()
            # The allocator hands the memory to later work of compute, which must not start before the copy is done.
            lanes.compute.wait(landed)
            del tensor
        lanes.download.wait(lanes.compute.record())
        with lanes.download:
            self.host_TH(slot, pack).copy_(hidden_TH, non_blocking=True)
        landed = lanes.download.record()
        self._landed[slot, pack] = landed
        self._outgoing.append((hidden_TH, landed))

    def prefetch(self, slot: int, pack: int) -> None:
        """Start bringing (slot, pack) back unless it is under way already or not there yet."""
        if (slot, pack) in self._arriving or (slot, pack) not in self._landed:
            return
        lanes = self._lanes
        source_TH = self.host_TH(slot, pack)
        hidden_TH = self._buffer_TH(source_TH.shape[0])
        # The memory belongs to compute's order of things: its earlier users on compute must be done before fetch writes
        # it.
        lanes.fetch.wait(lanes.compute.record())
        lanes.fetch.wait(self._landed[slot, pack])
        with lanes.fetch:
            hidden_TH.copy_(source_TH, non_blocking=True)
        self._arriving[slot, pack] = (hidden_TH, lanes.fetch.record())

    def take(self, slot: int, pack: int, *, forget: bool) -> Tensor:
        """Hidden states (T, H) of (slot, pack) on the device, ready for compute.

        forget: nobody reads them again, so that a later prefetch of the slot waits for new content instead of fetching
            the old.
        """
        self.prefetch(slot, pack)
        hidden_TH, arrived = self._arriving.pop((slot, pack))
        if forget:
            del self._landed[slot, pack]
        self._lanes.compute.wait(arrived)
        return hidden_TH

    def close(self) -> None:
        try:
            self._lanes.synchronize()
        finally:
            self._arriving.clear()
            self._outgoing.clear()
            self._arena.close()
            self._region.close()


def buffer_bytes(hidden_bytes: int) -> int:
    """Device memory that a tensor of `hidden_bytes` takes in the arena."""
    return max(hidden_bytes, _LEAST_BYTES)
