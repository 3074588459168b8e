"""HiddenStates: the running hidden states and gradients of a sweep, kept on the device for the first packs and passed
through the host for the rest.

Whether a pack is resident changes where its numbers wait, never what they are.

Shapes: T tokens of a pack, H hidden size.
"""

from collections.abc import Sequence

from torch import Tensor

from megatrain_rl.streaming.schedule import Kind, LayerSchedule, Visit
from megatrain_rl.transfer.activations import ActivationStore, buffer_bytes


class HiddenStates:
    """pack_tokens: size of each pack. resident_bytes: device memory for the running tensors of the first packs."""

    def __init__(
        self, store: ActivationStore, schedule: LayerSchedule, pack_tokens: Sequence[int], resident_bytes: int
    ):
        self._store = store
        self._running_slot = schedule.running_slot
        self._saved = {schedule.saved_slot(b) for b in range(schedule.num_layers)} - {None}
        count = resident_bytes // buffer_bytes(store.bytes_per_token * max(pack_tokens))
        self._num_packs = len(pack_tokens)
        self._resident = set(range(min(count, self._num_packs)))
        self._running: dict[int, Tensor] = {}

    def prefetch(self, visit: Visit, m: int) -> None:
        """Start fetching what `visit` will take for pack `m`."""
        if visit.kind is not Kind.FORWARD or m not in self._running:
            self._store.prefetch(visit.input_slot, m)
        if visit.kind is Kind.BACKWARD and m not in self._resident:
            self._store.prefetch(self._running_slot, m)

    def take_input(self, visit: Visit, m: int) -> Tensor:
        """Input (T, H) of the visited layer."""
        if visit.kind is Kind.FORWARD and m in self._running:
            return self._running.pop(m)
        return self._store.take(visit.input_slot, m, forget=visit.last_read)

    def give_output(self, visit: Visit, m: int, hidden_TH: Tensor) -> None:
        """Output (T, H) of a FORWARD or RECOMPUTE visit."""
        hidden_TH = self._store.hold(hidden_TH)
        resident = visit.kind is Kind.FORWARD and m in self._resident
        if not resident or visit.output_slot != self._running_slot:
            self._store.put(visit.output_slot, m, hidden_TH)
        if resident:
            self._running[m] = hidden_TH

    def take_final(self, m: int) -> Tensor:
        """Output (T, H) of the last layer for pack `m`; that of the next pack starts on its way."""
        if m + 1 < self._num_packs and m + 1 not in self._resident:
            self._store.prefetch(self._running_slot, m + 1)
        return self._take_running(m)

    def take_gradient(self, m: int) -> Tensor:
        """Gradient (T, H) of what was given last for pack `m`."""
        return self._take_running(m)

    def give_gradient(self, m: int, grad_TH: Tensor) -> None:
        grad_TH = self._store.hold(grad_TH)
        if m in self._resident:
            self._running[m] = grad_TH
        else:
            self._store.put(self._running_slot, m, grad_TH)

    def _take_running(self, m: int) -> Tensor:
        if m in self._resident:
            return self._running.pop(m)
        return self._store.take(self._running_slot, m, forget=True)
