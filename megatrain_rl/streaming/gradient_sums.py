"""GradientSums: fp32 sums of a sweep's gradients on the device, and their way out into HostGradients.

Made by the executor for training. What an earlier sweep has left on the host comes back, is added, and leaves again,
rounded as grad_slabs.py says.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatrain_rl.config import StreamConfig
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.model.decoder import Block
from megatrain_rl.transfer.grad_slabs import GradSlabPool
from megatrain_rl.transfer.lanes import Lanes


class GradientSums:
    """slab_numel: elements of a slab; there are `config.num_grad_slabs`.

    on_landed(block, norm): called on a thread of its own when what was pushed of a block is complete in `gradients`.
    """

    def __init__(
        self,
        lanes: Lanes,
        device: torch.device,
        config: StreamConfig,
        slab_numel: int,
        gradients: HostGradients,
        on_landed: Callable[[Block, float], None],
    ):
        def landed(block: Block, norm: float) -> None:
            gradients.landed(block, norm)
            on_landed(block, norm)

        self._device = device
        self._gradients = gradients
        self._sweep = 0
        self._num_pushed = 0
        self._slabs = GradSlabPool(
            lanes, device, num_slabs=config.num_grad_slabs, slab_numel=slab_numel, dtype=config.grad_torch_dtype,
            on_landed=landed,
        )  # fmt: skip

    def begin(self) -> None:
        """Start a sweep, when everything pushed by earlier ones has landed; raises what went wrong on their way."""
        self.drain()
        self._sweep = self._gradients.begin_sweep()
        self._num_pushed = 0

    def new(self, block: Block) -> Tensor:
        """A sum of zeros, fp32 (layout numel,)."""
        return torch.zeros(block.layout.numel, dtype=torch.float32, device=self._device)

    def prefetch_earlier(self, block: Block) -> None:
        """Start the way back of an earlier sweep's gradient, if there is one; `push` must be next."""
        if self._gradients.has(block):
            self._slabs.prefetch_earlier(self._gradients.flat(block))

    def push(self, block: Block, total: Tensor) -> None:
        """Send a block's sum out, added to that of earlier sweeps, if any. Compute may reuse `total` at once."""
        grad_host = self._gradients.flat(block)
        if self._gradients.has(block):
            self._slabs.add_earlier(grad_host, total)
        self._num_pushed += 1
        # The first sweep's roundings are too few to add up: a tied matrix has two, every other block one.
        seed = None if self._sweep == 0 else (self._sweep << 20) + self._num_pushed
        self._slabs.push(block, total, grad_host, seed=seed)

    def drain(self) -> None:
        """Wait until everything pushed has landed; raises what went wrong on the way."""
        self._slabs.drain()

    def close(self) -> None:
        self._slabs.close()
