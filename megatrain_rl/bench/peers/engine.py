"""What a worker asks of an engine."""

from collections.abc import Sequence
from typing import Protocol

from megatrain_rl.batch import PackedBatch
from megatrain_rl.bench.data import PolicyGradientSurrogate
from megatrain_rl.config import AdamWConfig

# The same update everywhere: this package's defaults.
ADAMW = AdamWConfig()


class PeerEngine(Protocol):
    """settings: what to print of how the engine was set up."""

    settings: str

    @property
    def pack_tokens(self) -> int: ...

    def step(self, packs: Sequence[PackedBatch], objective: PolicyGradientSurrogate) -> str:
        """One update with the gradients of all packs; returns what to print of it."""

    def finish(self) -> None:
        """Until everything that steps have started has ended."""

    def close(self) -> None: ...
