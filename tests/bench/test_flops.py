"""FLOPs and bytes: by hand, by torch's counter, and what bounds a step."""

import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatrain_rl.batch import pack_sequences
from megatrain_rl.bench.ceilings import Ceilings
from megatrain_rl.bench.flops import (
    Traffic,
    adamw_bytes_per_parameter,
    attention_flops,
    forward_traffic,
    light_speed,
    matmul_parameters,
    mean_flops,
    step_traffic,
    useful_flops,
)
from megatrain_rl.config import StreamConfig
from megatrain_rl.model.decoder import decoder_spec

LENGTHS = [48, 16, 33]
# tiny.config: hidden 64, intermediate 160, 4 heads and 2 key-value heads of size 16, vocabulary 320
LAYER = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160
LAYER_VECTORS = 64 + 2 * 32 + 2 * 64  # biases of q, k, v; two norms


@pytest.mark.parametrize("tied", [True, False])
def test_by_hand(tied):
    spec = decoder_spec(tiny.config(layers=3, tied=tied))
    parameters = 3 * LAYER + 320 * 64
    attention = 3 * 2 * 2 * (48**2 + 16**2 + 33**2) / 2 * 4 * 16
    assert matmul_parameters(spec) == parameters
    assert attention_flops(spec, LENGTHS) == attention
    assert useful_flops(spec, LENGTHS, train=False) == 2 * parameters * 97 + attention
    assert useful_flops(spec, LENGTHS, train=True) == 6 * parameters * 97 + 3 * attention


def test_shared_prompts_by_hand():
    """Two answers of 6 and 10 tokens to a prompt of 30: 46 tokens, and attention without the prompt's second time."""
    spec = decoder_spec(tiny.config(layers=3))
    data = [torch.cat([torch.arange(30), 100 + torch.arange(n)]) for n in (6, 10)]
    (packs,) = [pack_sequences(data, max_tokens=100, prompt_lengths=[30, 30])]
    attention = 3 * 2 * 2 * (36**2 + 40**2 - 30**2) / 2 * 4 * 16
    assert mean_flops(spec, [packs], train=False) == 2 * matmul_parameters(spec) * 46 + attention
    unshared = pack_sequences(data, max_tokens=100)
    assert mean_flops(spec, [unshared], train=False) == useful_flops(spec, [36, 40], train=False)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_against_torchs_counter(family):
    """The counter sees whole squares where causal attention needs half of each, and the tables of rotary angles."""
    config = tiny.config(family, layers=3)
    model = tiny.model(config)
    spec = decoder_spec(config)
    with FlopCounterMode(display=False) as counter:
        for n in LENGTHS:
            model(input_ids=torch.zeros(1, n, dtype=torch.long), use_cache=False).logits.sum().backward()
    rotary = sum(2 * n * 16 / 2 for n in LENGTHS)
    full_squares = 3 * attention_flops(spec, LENGTHS)
    assert counter.get_total_flops() - rotary - full_squares == useful_flops(spec, LENGTHS, train=True)


@pytest.mark.parametrize("tied", [True, False])
def test_traffic_of_a_step(tied):
    spec = decoder_spec(tiny.config(layers=3, tied=tied))
    layers, matrix = 3 * (LAYER + LAYER_VECTORS), 320 * 64
    total = layers + matrix * (1 if tied else 2) + 64
    inputs = 3 * 97 * 64 * 2
    once = step_traffic(spec, StreamConfig(), 97, sweeps=1)
    assert once.up == 2 * (2 * layers + matrix + 64) + inputs
    assert once.down == inputs + 2 * total
    assert once.optimizer == 26 * total
    thrice = step_traffic(spec, StreamConfig(), 97, sweeps=3)
    assert thrice.up == 3 * 2 * (2 * layers + matrix + 64) + inputs + 2 * 2 * total
    assert thrice.down == inputs + 3 * 2 * total
    every_second = step_traffic(spec, StreamConfig(checkpoint_interval=2), 97, sweeps=1)
    assert once.down - every_second.down == inputs // 3  # two of three layer inputs are kept
    forward = forward_traffic(spec, StreamConfig(), 97, sweeps=1)
    assert forward == Traffic(up=2 * (layers + matrix + 64) + 97 * 64 * 2, down=0, optimizer=0)


def test_bytes_of_an_update():
    assert adamw_bytes_per_parameter(StreamConfig()) == 26
    assert adamw_bytes_per_parameter(StreamConfig(optimizer_state_dtype="bfloat16")) == 18
    assert adamw_bytes_per_parameter(StreamConfig(param_dtype="float32", grad_dtype="float32")) == 28


CEILINGS = Ceilings(
    matmul_tflops=500,
    matmul_burst_tflops=600,
    h2d_gb_s=50,
    d2h_gb_s=40,
    both_gb_s=80,
    host_copy_gb_s=70,
    host_update_gb_s=100,
)


@pytest.mark.parametrize(
    "flops, up, down, optimizer, seconds, bound",
    [
        (1e15, 0, 0, 0, 2.0, "compute"),
        (1e12, 100_000_000_000, 0, 0, 2.0, "link"),
        (1e12, 0, 60_000_000_000, 0, 1.5, "link"),
        (1e12, 10_000_000_000, 10_000_000_000, 80_000_000_000, 0.8, "host_memory"),
    ],
)
def test_light_speed_is_the_slowest_part(flops, up, down, optimizer, seconds, bound):
    light = light_speed(flops, Traffic(up=up, down=down, optimizer=optimizer), CEILINGS)
    assert light.seconds == pytest.approx(seconds) and light.bound_by == bound
    assert f"bound by {bound}" in str(light)
