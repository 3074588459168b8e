"""Gradients summed over many sweeps: a bf16 sum on the host stays the sum, whatever the number of its roundings."""

import pytest
import tiny
import torch

from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.model.decoder import decoder_spec
from megatrain_rl.objectives import NegativeLogLikelihood
from megatrain_rl.streaming.gradient_sums import GradientSums
from megatrain_rl.transfer.grad_slabs import round_at_random_
from megatrain_rl.transfer.lanes import Lanes

SWEEPS = 400


def summed(device: str, gradient, *, sweeps: int = SWEEPS, num_grad_slabs: int = 3, slab_numel: int = 9999):
    """(host sum, fp32 sum) of `gradient(i)` over the sweeps, of the first layer."""
    spec = decoder_spec(tiny.config(layers=1))
    block = spec.layers[0]
    gradients = HostGradients(spec, torch.bfloat16, pin=device == "cuda")
    target = torch.device(device)
    config = StreamConfig(num_grad_slabs=num_grad_slabs)
    sums = GradientSums(Lanes.on(target), target, config, slab_numel, gradients, lambda block, norm: None)
    exact = torch.zeros(block.layout.numel)
    for i in range(sweeps):
        sums.begin()
        sums.prefetch_earlier(block)
        part = gradient(i, block.layout.numel)
        exact += part
        sums.push(block, part.clone().to(device))
    sums.drain()
    host = gradients.flat(block).clone()
    sums.close()
    gradients.close()
    return host.float(), exact


def alike(i: int, numel: int) -> torch.Tensor:
    """The same direction every time, with some noise: what packs of one mini-batch look like to the largest entries."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(numel, generator=generator)
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(i + 1))
    return direction + 0.1 * noise


def unlike(i: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(i + 1))


@pytest.mark.parametrize("gradient", [alike, unlike])
def test_norm_and_direction_survive_many_roundings(device, gradient):
    host, exact = summed(device, gradient)
    assert (host.norm() / exact.norm()).item() == pytest.approx(1, abs=2e-3)
    assert torch.cosine_similarity(host, exact, dim=0).item() > 0.999


def test_no_entry_stands_still(device):
    """The mean over entries follows the sum also when each part is far below a unit in the last place."""
    host, exact = summed(device, lambda i, numel: torch.full((numel,), 256.0 if i == 0 else 0.5))  # of 2
    assert host.mean().item() == pytest.approx(exact.mean().item(), rel=1e-3)


def test_one_sweep_rounds_to_the_nearest(device):
    host, exact = summed(device, unlike, sweeps=1)
    assert torch.equal(host, exact.bfloat16().float())


def test_it_repeats_to_the_bit_however_slabs_cut_it(device):
    first, _ = summed(device, alike, sweeps=5)
    assert torch.equal(first, summed(device, alike, sweeps=5)[0])
    assert torch.equal(first, summed(device, alike, sweeps=5, num_grad_slabs=7, slab_numel=501)[0])


def test_random_rounding_takes_a_neighbour_and_keeps_what_is_not_finite(device):
    generator = torch.Generator(device).manual_seed(3)
    values = torch.randn(5000, device=device)
    rounded = values.clone()
    round_at_random_(rounded, generator)
    assert torch.equal(rounded.bfloat16().float(), rounded)
    assert ((rounded - values).abs() < values.abs() * 2**-7).all() and not torch.equal(rounded, values)
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf")], device=device)
    again = exact.clone()
    round_at_random_(again, generator)
    assert torch.equal(again.view(torch.int32), exact.view(torch.int32))
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32, device=device).view(torch.float32)
    round_at_random_(nans, generator)
    assert nans.isnan().all()


@pytest.mark.parametrize("tied", [False, True])
def test_a_trainer_s_sum_of_many_calls(tmp_path, tied):
    """bf16 gradients of 60 calls against fp32 ones; of one call they are the fp32 ones rounded, to the bit."""
    made = tiny.saved(tiny.model(tiny.config(layers=2, tied=tied)), tmp_path)
    packs = tiny.packs(tiny.sequences())
    found = {}
    for dtype in ("bfloat16", "float32"):
        for calls in (1, 60):
            trainer = tiny.trainer(made, grad_dtype=dtype, adamw=AdamWConfig(lr=0.0, weight_decay=0.0))
            for _ in range(2):  # the sum after an update is as good as the first, and the same
                for _ in range(calls):
                    trainer.forward_backward(packs, NegativeLogLikelihood(packs))
                flat = torch.cat([g.flatten().float() for _, g in trainer.named_gradients()])
                assert torch.equal(found.setdefault((dtype, calls), flat), flat)
                trainer.optim_step()
            trainer.close()
    if not tied:  # a tied matrix is rounded twice: with the head's part, and with the embedding's added
        assert torch.equal(found["bfloat16", 1], found["float32", 1].bfloat16().float())
    ours, exact = found["bfloat16", 60], found["float32", 60]
    assert (ours.norm() / exact.norm()).item() == pytest.approx(1, abs=2e-3)
    assert torch.cosine_similarity(ours, exact, dim=0).item() > 0.999
