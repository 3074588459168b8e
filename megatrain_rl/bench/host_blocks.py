"""Blocks of host memory as the trainer holds them, with numbers in them, for benchmarks of the host optimizer."""

import torch

from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.config import AdamWConfig
from megatrain_rl.host.pinned import HostRegion
from megatrain_rl.model.decoder import Block, decoder_spec
from megatrain_rl.ops.adamw import AdamWScalars, adamw_native
from megatrain_rl.optim.host_adamw import BlockState

ADAMW = AdamWConfig()
GRADIENT_SCALE = 1e-3


class HostBlock:
    """One layer in host memory: weights and gradients (bf16, pinned where `pin`) and the optimizer's state. dtype: of
    the moments."""

    def __init__(self, block: Block, *, dtype: torch.dtype, pin: bool):
        numel = block.layout.numel
        self._weight = HostRegion(numel, torch.bfloat16, pin=pin)
        self._grad = HostRegion(numel, torch.bfloat16, pin=pin)
        self._state = BlockState(block, split=True, dtype=dtype)
        self.numel = numel
        fill_with_noise(self._weight.flat, 0.02)
        fill_with_noise(self._grad.flat, GRADIENT_SCALE)

    def step(self, scalars: AdamWScalars, threads: int) -> None:
        state = self._state
        adamw_native(
            self._weight.flat, state.residual, self._grad.flat, state.exp_avg, state.exp_avg_sq, scalars, threads
        )

    def close(self) -> None:
        self._weight.close()
        self._grad.close()


def host_blocks(shape: str, parameters: int, *, dtype: torch.dtype, pin: bool) -> list[HostBlock]:
    """Layers of `shape`, as many as hold at least `parameters`."""
    block = decoder_spec(shape_config(shape, layers=1)).layers[0]
    return [HostBlock(block, dtype=dtype, pin=pin) for _ in range(-(-parameters // block.layout.numel))]


def scalars(step: int) -> AdamWScalars:
    a = ADAMW
    return AdamWScalars.of(lr=a.lr, betas=a.betas, eps=a.eps, weight_decay=a.weight_decay, step=step, grad_scale=1.0)


def fill_with_noise(flat: torch.Tensor, scale: float) -> None:
    """Fill with normal numbers, one stretch of them over and over: drawing every one would take longer than what is
    measured."""
    stretch = (torch.randn(min(flat.numel(), 1 << 22), generator=torch.Generator().manual_seed(0)) * scale).to(
        flat.dtype
    )
    for start in range(0, flat.numel(), stretch.numel()):
        part = flat[start : start + stretch.numel()]
        part.copy_(stretch[: part.numel()])
