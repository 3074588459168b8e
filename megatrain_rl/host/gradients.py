"""HostGradients: where gradients land, one flat region per block, laid out like the weights."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatrain_rl.host.pinned import HostRegion
from megatrain_rl.model.decoder import Block, DecoderSpec


class HostGradients:
    """A block whose gradient has landed is to be added to; the regions of the others hold stale numbers."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, *, pin: bool):
        self._blocks = spec.blocks
        self._regions = {b.name: HostRegion(b.layout.numel, dtype, pin=pin) for b in spec.blocks}
        self._norms: dict[str, float] = {}  # by block that has landed
        self._num_sweeps = 0

    def flat(self, block: Block) -> Tensor:
        return self._regions[block.name].flat

    def begin_sweep(self) -> int:
        """How many sweeps have begun since the regions were last cleared, without this one."""
        self._num_sweeps += 1
        return self._num_sweeps - 1

    def landed(self, block: Block, norm: float) -> None:
        """The region of `block` holds a gradient of this L2 norm. Called on the thread that waits for landings."""
        self._norms[block.name] = norm

    def has(self, block: Block) -> bool:
        return block.name in self._norms

    @property
    def any(self) -> bool:
        return bool(self._norms)

    @property
    def complete(self) -> bool:
        return self._norms.keys() == self._regions.keys()

    def norm(self) -> float:
        """L2 norm over all blocks, in their order: it does not depend on which landed first."""
        return math.hypot(*(self._norms[name] for name in self._regions))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, shaped view) of every parameter's gradient, in the order of the blocks."""
        for block in self._blocks:
            for name in block.layout.slots:
                yield block.names[name], block.layout.view(self.flat(block), name)

    def clear(self) -> None:
        self._norms.clear()
        self._num_sweeps = 0

    def close(self) -> None:
        for region in self._regions.values():
            region.close()
