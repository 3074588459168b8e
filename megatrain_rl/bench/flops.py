"""FLOPs and bytes that a step cannot do without, and the time they take at the ceilings of this machine.

useful FLOPs of a training step = 6 N T + attention, forward only a third of that, with
    N   parameters in matrix products: layers and output matrix (a tied one once; looking rows up is no product)
    T   tokens, without padding
    attention, forward: 2 products x 2 FLOPs x sum over sequences of L^2 / 2 (causal) x heads x head size x layers.
Tokens that are computed for another sequence (a shared prompt) are not among T, and their P^2 / 2 not in attention.
Recomputation counts as nothing: it is the schedule's choice.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain_rl.batch import PackedBatch
from megatrain_rl.bench.ceilings import Ceilings
from megatrain_rl.config import StreamConfig
from megatrain_rl.model.decoder import DecoderSpec
from megatrain_rl.planner import state_bytes_per_parameter

_QUERY_WEIGHT = "self_attn.q_proj.weight"  # its rows are heads x head size in every family


def matmul_parameters(spec: DecoderSpec) -> int:
    """Parameters that are factors of a matrix product in one forward."""
    slots = [slot for block in spec.layers for slot in block.layout.slots.values() if len(slot.shape) == 2]
    return sum(slot.numel for slot in slots) + spec.vocab_size * spec.hidden_size


def attention_flops(spec: DecoderSpec, lengths: Sequence[int], shared: Sequence[int] | None = None) -> float:
    """FLOPs of one causal forward over sequences of these lengths, in all layers; see `useful_flops`."""
    width = sum(block.layout.slots[_QUERY_WEIGHT].shape[0] for block in spec.layers)
    pairs = sum(n * n / 2 for n in lengths) - sum(p * p / 2 for p in shared or ())
    return 2 * 2 * width * pairs


def useful_flops(
    spec: DecoderSpec, lengths: Sequence[int], *, train: bool, shared: Sequence[int] | None = None
) -> float:
    """FLOPs of one training step, or of one forward, over sequences of these lengths; see the top of this file.

    shared: how many tokens of each sequence are computed for another one.
    """
    tokens = sum(lengths) - sum(shared or ())
    forward = 2 * matmul_parameters(spec) * tokens + attention_flops(spec, lengths, shared)
    return 3 * forward if train else forward


def mean_flops(spec: DecoderSpec, batches: Sequence[Sequence[PackedBatch]], *, train: bool) -> float:
    """The mean of `useful_flops` over these batches: lengths differ from one to the next, and with them attention."""
    return statistics.fmean(sum(_pack_flops(spec, pack, train=train) for pack in packs) for packs in batches)


def _pack_flops(spec: DecoderSpec, pack: PackedBatch, *, train: bool) -> float:
    lengths = pack.cu_seqlens.diff().tolist()
    shared = [int((~part).sum()) for part in pack.computed_T.split(lengths)]
    return useful_flops(spec, lengths, train=train, shared=shared)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one step: up and down the link, and those the host optimizer reads and writes."""

    up: int
    down: int
    optimizer: int


def step_traffic(spec: DecoderSpec, config: StreamConfig, tokens: int, *, sweeps: int) -> Traffic:
    """Bytes of a training step in `sweeps` sweeps. Layers' weights go up twice a sweep, the head's once. Gradients come
    down once a sweep and go up again in each sweep after the first. Layer inputs go down and up."""
    weight, grad = config.param_torch_dtype.itemsize, config.grad_torch_dtype.itemsize
    inputs = math.ceil(spec.num_layers / config.checkpoint_interval) * tokens * spec.hidden_size * weight
    gradients = spec.num_parameters * grad
    weights = sweeps * weight * (2 * _layer_parameters(spec) + _head_parameters(spec))
    return Traffic(
        up=weights + inputs + (sweeps - 1) * gradients,
        down=inputs + sweeps * gradients,
        optimizer=spec.num_parameters * adamw_bytes_per_parameter(config),
    )


def forward_traffic(spec: DecoderSpec, config: StreamConfig, tokens: int, *, sweeps: int) -> Traffic:
    """Bytes of a forward: each weight goes up once a sweep, and so do the embedded tokens."""
    weight = config.param_torch_dtype.itemsize
    weights = sweeps * weight * (_layer_parameters(spec) + _head_parameters(spec))
    return Traffic(up=weights + tokens * spec.hidden_size * weight, down=0, optimizer=0)


def adamw_bytes_per_parameter(config: StreamConfig) -> int:
    """Bytes that one update reads and writes: weight, residual and both moments each way, the gradient once. That is 26
    with bf16 weights and fp32 moments, 18 with bf16 moments."""
    return 2 * state_bytes_per_parameter(config) + config.grad_torch_dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class LightSpeed:
    """Seconds that each part of the machine would need for a step at its ceiling. The parts work at the same time, so
    the longest bounds the step.

    host_memory: for what the cores read and write, so the optimizer's traffic; transfers bypass the cores and are
    counted under link alone.
    """

    compute: float
    link: float
    host_memory: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.link, self.host_memory)

    @property
    def bound_by(self) -> str:
        return max(("compute", "link", "host_memory"), key=lambda part: vars(self)[part])

    def __str__(self) -> str:
        return (
            f"light speed {self.seconds:.3f} s, bound by {self.bound_by} (compute {self.compute:.3f}, link {self.link:.3f}, "
            f"host memory {self.host_memory:.3f})"
        )


def light_speed(flops: float, traffic: Traffic, ceilings: Ceilings) -> LightSpeed:
    return LightSpeed(
        compute=flops / (ceilings.matmul_tflops * 1e12),
        link=max(traffic.up / (ceilings.h2d_gb_s * 1e9), traffic.down / (ceilings.d2h_gb_s * 1e9)),
        host_memory=traffic.optimizer / (ceilings.host_update_gb_s * 1e9),
    )


def _layer_parameters(spec: DecoderSpec) -> int:
    return sum(block.layout.num_parameters for block in spec.layers)


def _head_parameters(spec: DecoderSpec) -> int:
    """Parameters of the final norm and of the output matrix, tied or not."""
    return spec.head.layout.num_parameters + (spec.embed.layout.num_parameters if spec.tied else 0)
