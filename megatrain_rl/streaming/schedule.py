"""LayerSchedule: which layer is visited when, and where its input comes from. Pure Python.

Layer-major: a visit runs one layer over all packs of the sweep, so a layer's weights cross the link once per visit.
Boundary b is the input of layer b. Every `checkpoint_interval`-th boundary has a slot of its own in the activation
store; between two of them backward first recomputes the inputs of its window.
"""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    FORWARD = "forward"
    RECOMPUTE = "recompute"  # forward again, inside a backward window
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class Visit:
    """input_slot, output_slot: places in the activation store; the output of a BACKWARD visit is a gradient.
    last_read: nothing reads the input slot after this visit until it is written again."""

    kind: Kind
    layer: int
    input_slot: int
    output_slot: int
    last_read: bool


class LayerSchedule:
    """visits: forward over all layers, then, when training, backward over all layers.

    running_slot: for hidden states that are not kept, and for the gradients of backward. num_slots: slots in all.
    """

    def __init__(self, num_layers: int, checkpoint_interval: int, *, train: bool):
        self.num_layers = num_layers
        self._interval = checkpoint_interval if train else num_layers
        num_saved = -(-num_layers // self._interval)
        self._first_window_slot = num_saved
        num_window = min(self._interval, num_layers) - 1 if train else 0
        self.running_slot = num_saved + num_window
        self.num_slots = self.running_slot + 1
        self.visits = self._forward(train)
        self.num_forward = len(self.visits)
        if train:
            self.visits += self._backward()

    def saved_slot(self, boundary: int) -> int | None:
        """Slot that keeps `boundary` from forward to backward, or None."""
        if boundary < self.num_layers and boundary % self._interval == 0:
            return boundary // self._interval
        return None

    def _forward(self, train: bool) -> list[Visit]:
        visits = []
        for layer in range(self.num_layers):
            source, target = self.saved_slot(layer), self.saved_slot(layer + 1)
            visits.append(
                Visit(
                    kind=Kind.FORWARD,
                    layer=layer,
                    input_slot=self.running_slot if source is None else source,
                    output_slot=self.running_slot if target is None else target,
                    last_read=source is None or not train,
                )
            )
        return visits

    def _backward(self) -> list[Visit]:
        visits = []
        for first in reversed(range(0, self.num_layers, self._interval)):
            last = min(first + self._interval, self.num_layers) - 1
            for layer in range(first, last):
                visits.append(
                    Visit(
                        kind=Kind.RECOMPUTE,
                        layer=layer,
                        input_slot=self._window_slot(first, layer),
                        output_slot=self._window_slot(first, layer + 1),
                        last_read=False,
                    )
                )
            for layer in range(last, first - 1, -1):
                visits.append(
                    Visit(
                        kind=Kind.BACKWARD,
                        layer=layer,
                        input_slot=self._window_slot(first, layer),
                        output_slot=self.running_slot,
                        last_read=True,
                    )
                )
        return visits

    def _window_slot(self, first: int, layer: int) -> int:
        return first // self._interval if layer == first else self._first_window_slot + layer - first - 1
