"""AdamW by torch and by DeepSpeed over the exact master: the same update as the native op, to fp32 rounding."""

import pytest
import torch

from megatrain_rl.config import AdamWConfig
from megatrain_rl.ops.adamw import AdamWScalars, adamw_reference, join_master, split_master
from megatrain_rl.optim import library


@pytest.mark.parametrize("make", [library.torch_adamw, library.deepspeed_adamw])
@pytest.mark.parametrize("split", [True, False])
def test_same_update_as_the_reference(make, split, monkeypatch):
    monkeypatch.setattr(library, "_CHUNK", 1000)  # several chunks and a rest
    adamw = AdamWConfig(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    stepper = make(adamw)
    torch.manual_seed(0)
    n = 3300
    master = torch.randn(n)
    grad = torch.randn(n).to(torch.bfloat16)

    def fresh():
        if not split:
            return [master.clone(), None, grad, torch.zeros(n), torch.zeros(n)]
        weight, residual = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
        split_master(master, weight, residual)
        return [weight, residual, grad, torch.zeros(n), torch.zeros(n)]

    ours, theirs = fresh(), fresh()
    for step in range(1, 5):
        lr = 1e-2 / step
        scalars = AdamWScalars.of(
            lr=lr, betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay, step=step, grad_scale=0.5
        )
        adamw_reference(*ours, scalars)
        stepper.step(*theirs, lr=lr, step=step, scale=0.5)
    for a, b in zip(ours[3:], theirs[3:], strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-8)
    whole = [join_master(s[0], s[1]) if split else s[0] for s in (ours, theirs)]
    assert torch.allclose(*whole, rtol=5e-6, atol=1e-6)


def test_missing_deepspeed_is_one_clear_error(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)
    with pytest.raises(ValueError, match=r"megatrain-rl\[deepspeed\]"):
        library.deepspeed_adamw(AdamWConfig())
