"""Streams that are late, or not the caller's own: whoever failed to wait would read old or half-written numbers."""

import dataclasses

import pytest
import tiny
import torch

from megatrain_rl.config import AdamWConfig
from megatrain_rl.model.template import LayerRunner
from megatrain_rl.streaming.gradient_sums import GradientSums
from megatrain_rl.transfer.lanes import Lane

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lane", ["compute", "upload", "fetch", "download"])
def test_delays_on_a_lane_change_no_bit(tmp_path, monkeypatch, deterministic, lane, tied):
    """Sleeping kernels on one lane: whoever failed to wait for it would read old or half-written numbers."""
    directory = tiny.saved(tiny.model(tiny.config(layers=7, tied=tied), dtype=torch.bfloat16), tmp_path)
    data = tiny.sequences()

    def run(delayed: bool, *, resident_bytes=None, **knobs):
        trainer = tiny.trainer(
            directory, device="cuda", param_dtype="bfloat16", grad_dtype="bfloat16", reference=True,
            adamw=AdamWConfig(lr=1e-3, clip_grad=None),  # every update begins beneath backward
            **knobs,
        )  # fmt: skip
        ring_in_head = knobs.get("ring_depth") != 1
        trainer._executor._plan = dataclasses.replace(trainer._executor._plan, ring_in_head=ring_in_head)
        if resident_bytes is not None:
            trainer._executor._plan = dataclasses.replace(trainer._executor._plan, resident_bytes=resident_bytes)
        with monkeypatch.context() as patch:
            if delayed and lane == "compute":

                def slowed(method):
                    def slow(self, *args):
                        torch.cuda._sleep(3_000_000)
                        return method(self, *args)

                    return slow

                slow = ((LayerRunner, "layer"), (LayerRunner, "vjp"), (LayerRunner, "norm"), (GradientSums, "push"))
                for owner, name in slow:
                    patch.setattr(owner, name, slowed(getattr(owner, name)))
            elif delayed:
                chosen, enter = getattr(trainer._executor._lanes, lane), Lane.__enter__

                def slow_enter(self):
                    enter(self)
                    if self is chosen:
                        torch.cuda._sleep(3_000_000)

                patch.setattr(Lane, "__enter__", slow_enter)
            packs, objective = tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data))
            for _ in range(3):
                reference = trainer.log_probs(packs, weights="reference")
                trainer.forward_backward(packs, objective)
                trainer.forward_backward(packs, objective, final=True)  # the first sums come back and are added to
                trainer.optim_step()
            result = {n: w.clone() for n, w in trainer.named_parameters()}
            result |= {f"reference {m}": s.log_probs_T for m, s in enumerate(reference)}
        trainer.close()
        return result

    base = run(False)
    for knobs in (
        dict(),
        dict(resident_bytes=0),
        dict(num_grad_slabs=2),
        dict(checkpoint_interval=3, resident_bytes=0),
        dict(ring_depth=1),
        dict(overlap_optimizer=False),
    ):
        slow = run(True, **knobs)
        assert all(torch.equal(slow[n], base[n]) for n in base), knobs


def test_the_caller_may_be_on_any_stream(tmp_path, deterministic):
    """Built on one stream, used on another: kernels still go where the transfers expect them."""
    directory = tiny.saved(tiny.model(tiny.config(layers=7), dtype=torch.bfloat16), tmp_path)
    packs = tiny.packs(tiny.sequences())
    results = []
    for other in (False, True):
        trainer = tiny.trainer(directory, device="cuda", param_dtype="bfloat16")
        with torch.cuda.stream(torch.cuda.Stream() if other else torch.cuda.current_stream()):
            if other:
                torch.cuda._sleep(50_000_000)
            results.append([s.log_probs_T for s in trainer.log_probs(packs)])
        trainer.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
