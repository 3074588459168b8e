"""HostGradients: where gradients land, one flat region per block, laid out like the weights."""

import torch
from torch import Tensor

from megatrain_rl.host.pinned import HostRegion
from megatrain_rl.model.decoder import Block, DecoderSpec


class HostGradients:
    """`filled` names the blocks whose region holds a gradient to be added to; the others hold stale numbers."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, *, pin: bool):
        self._regions = {b.name: HostRegion(b.layout.numel, dtype, pin=pin) for b in spec.blocks}
        self.filled: set[str] = set()

    def flat(self, block: Block) -> Tensor:
        return self._regions[block.name].flat

    def clear(self) -> None:
        self.filled.clear()

    def close(self) -> None:
        for region in self._regions.values():
            region.close()
