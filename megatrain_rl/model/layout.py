"""LayerLayout: the one map from a parameter's name to its place in a flat buffer.

Weights, residuals, moments and gradients of a block all use the same layout, on the host and on the device, so a block
crosses the link, is normed and is stepped as one contiguous tensor. Nothing else computes an offset.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# 64 elements keep every view 128-byte aligned in bf16, which matrix kernels want; the gaps stay zero for ever.
ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Place of one parameter: `flat[offset : offset + numel].view(shape)`."""

    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class LayerLayout:
    """Places of all parameters of one block, in the order given, each aligned."""

    def __init__(self, shapes: Mapping[str, torch.Size | tuple[int, ...]]):
        self.slots: dict[str, Slot] = {}
        offset = 0
        for name, shape in shapes.items():
            slot = Slot(offset=offset, shape=tuple(shape))
            self.slots[name] = slot
            offset += -(-slot.numel // ALIGNMENT) * ALIGNMENT
        self.numel = offset
        self.num_parameters = sum(s.numel for s in self.slots.values())

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The parameter `name` inside `flat` (at least `numel` long), shaped, sharing memory."""
        slot = self.slots[name]
        return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: self.view(flat, name) for name in self.slots}

    @property
    def signature(self) -> tuple:
        """Equal for two layers that one template can run."""
        return tuple((name, slot.shape) for name, slot in self.slots.items())
