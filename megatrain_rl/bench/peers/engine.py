"""The interface of an engine, as a worker uses it."""

from collections.abc import Sequence
from typing import Protocol

from megatrain_rl.batch import PackedBatch
from megatrain_rl.bench.data import PolicyGradientSurrogate
from megatrain_rl.config import AdamWConfig

# The same update everywhere: this package's defaults.
ADAMW = AdamWConfig()


class PeerEngine(Protocol):
    """An engine that holds a model and can train it. settings: what to print of how it was set up."""

    settings: str

    @property
    def pack_tokens(self) -> int:
        """The most tokens of one pack given to `step`."""

    def step(self, packs: Sequence[PackedBatch], objective: PolicyGradientSurrogate) -> str:
        """Make one update with the gradients of all packs; returns what to print of it."""

    def finish(self) -> None:
        """Wait until everything that steps have started has ended."""

    def close(self) -> None: ...
