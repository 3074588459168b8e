"""The states of an update, and when it may start before its norm is known: where a wrong guess is unlikely, by norms
alone.

What the worker makes of an early update is tested in test_host_adamw.py, what a whole step makes of it in
tests/test_overlap.py.
"""

import json
import math

import pytest
import tiny
import torch

from megatrain_rl.config import AdamWConfig
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.host.store import HostStore
from megatrain_rl.model.decoder import decoder_spec
from megatrain_rl.ops.adamw import Mode
from megatrain_rl.optim.host_adamw import HostAdamW
from megatrain_rl.optim.update import ClipGate, State, Update


@pytest.fixture
def make_update():
    """Updates of zero weights by zero gradients: only the states matter."""
    parts = []

    def make(*, tied=False, overlap=True, state_dtype=torch.float32, **settings) -> Update:
        spec = decoder_spec(tiny.config(layers=2, tied=tied))
        adamw = AdamWConfig(**{"lr": 1e-3, "clip_grad": None} | settings)
        store = HostStore(spec, torch.float32, pin=False)
        gradients = HostGradients(spec, torch.float32, pin=False)
        optimizer = HostAdamW(spec, store, gradients, adamw, None, state_dtype=state_dtype, threads=1)
        parts.extend((optimizer, gradients, store))
        return Update(spec, gradients, optimizer, adamw, overlap=overlap)

    yield make
    for part in parts:
        part.close()


def land(update: Update, *names: str, norm: float = 1.0) -> None:
    """Gradients of these blocks, or of all, are on the host."""
    for block in reversed(update.optimizer._blocks):
        if not names or block.name in names:
            update.gradients.landed(block, norm)
            update.landed(block, norm)


def test_an_early_update_from_promise_to_confirmation(make_update):
    update = make_update()
    assert update.state is State.CLOSED and not update.pending
    for _ in range(2):
        update.promise()
        assert update.state is State.PROMISED and update.pending
        update.guess(lr=1e-3)
        assert update.state is State.GUESSED and update.pending
        land(update)
        assert update.end(lr=1e-3).stepped
        assert update.state is State.CONFIRMED and not update.pending
        assert not update.gradients.complete
    update.optimizer.wait()
    assert update.optimizer.step_count == 2


@pytest.mark.parametrize("promised", [True, False])
def test_a_deferred_update_is_never_guessed(make_update, promised):
    """With a promise that is not worth a guess, and without a promise."""
    update = make_update(overlap=False)
    if promised:
        update.promise()
    update.guess(lr=1e-3)
    assert update.state is (State.PROMISED if promised else State.CLOSED)
    land(update)
    assert update.end(lr=1e-3).stepped and update.state is State.CONFIRMED


@pytest.mark.parametrize("guessed", [True, False])
def test_an_update_taken_back_counts_as_none(make_update, guessed):
    update = make_update(overlap=guessed)
    update.promise()
    update.guess(lr=1e-3)
    land(update)
    update.take_back()
    assert update.state is State.TAKEN_BACK and not update.pending and not update.gradients.complete
    update.optimizer.settle()
    assert update.optimizer.step_count == 0
    update.take_back()  # of nothing
    assert update.state is State.TAKEN_BACK and update.skipped_steps == 0
    update.promise()
    assert update.state is State.PROMISED


@pytest.mark.parametrize("what", ["norm", "loss"])
def test_an_update_that_is_not_finite_is_skipped(make_update, what):
    update = make_update()
    update.promise()
    update.nonfinite_loss = what == "loss"
    update.guess(lr=1e-3)
    assert update.state is (State.PROMISED if what == "loss" else State.GUESSED)
    land(update, norm=math.inf if what == "norm" else 1.0)
    result = update.end(lr=1e-3)
    assert not result.stepped and result.skipped_steps == 1 and not math.isfinite(result.grad_norm)
    assert update.state is State.TAKEN_BACK and not update.nonfinite_loss
    update.optimizer.settle()
    assert update.optimizer.step_count == 0


def test_gradients_must_be_complete(make_update):
    update = make_update()
    update.promise()
    land(update, "head")
    with pytest.raises(ValueError, match=r"^optim_step .*forward_backward"):
        update.end(lr=1e-3)


@pytest.mark.parametrize(
    "settings, lr",
    [
        (dict(overlap=False), 1e-3),
        (dict(weight_decay=2.0), 0.5),  # a weight that decays to nothing does not come back
        (dict(state_dtype=torch.bfloat16, betas=(0.9, 0.4)), 1e-3),  # moments that forget at once
        (dict(clip_grad=1.0), 1e-3),  # no norm seen yet
    ],
)
def test_what_speaks_against_a_guess(make_update, settings, lr):
    update = make_update(**settings)
    update.promise()
    update.guess(lr=lr)
    assert update.state is State.PROMISED


def test_a_tied_embedding_is_complete_when_it_has_landed_twice(make_update):
    """First comes the head's part of it, with which no step may be made."""
    update = make_update(tied=True)
    passes, do_pass = [], update.optimizer._do_pass
    update.optimizer._do_pass = lambda block, each: passes.append((block.name, each.mode)) or do_pass(block, each)
    update.promise()
    update.guess(lr=1e-3)
    land(update, "embed", norm=7.0)
    land(update, "head", "layers.1", "layers.0")
    update.optimizer.settle()
    assert sorted(passes) == [(name, Mode.GUARDED) for name in ("head", "layers.0", "layers.1")]
    land(update, "embed", norm=1.0)
    assert update.end(lr=1e-3).grad_norm == 2.0
    update.optimizer.wait()
    assert ("embed", Mode.STEP) in passes


@pytest.mark.parametrize("limit", [None, 0, 0.0])
def test_always_quiet_without_a_limit(limit):
    gate = ClipGate(limit)
    assert gate.quiet and gate.limit == float("inf")
    gate.saw(1e30)
    assert gate.quiet


def test_not_quiet_without_history():
    gate = ClipGate(1.0)
    assert not gate.quiet
    gate.saw(0.5)
    assert gate.quiet


@pytest.mark.parametrize("norm, is_quiet", [(0.0, True), (1.79, True), (1.81, False), (2.0, False), (50.0, False)])
def test_a_norm_near_the_limit_is_not_quiet(norm, is_quiet):
    gate = ClipGate(2.0)
    assert gate.limit == 2.0
    gate.saw(0.1)
    gate.saw(norm)
    assert gate.quiet is is_quiet


def test_it_takes_four_quiet_norms_after_a_loud_one():
    gate = ClipGate(1.0)
    gate.saw(3.0)
    for _ in range(3):
        gate.saw(0.2)
        assert not gate.quiet
    gate.saw(0.2)
    assert gate.quiet


def test_memory_survives_a_checkpoint():
    """Through JSON, at every length: a gate that resumes decides like the one that went on."""
    norms = [0.1, 0.95, 0.3, 0.2, 0.1 + 0.2, 0.4, 7.0, 0.1, 0.1, 0.1, 0.1]
    whole = ClipGate(1.0)
    for i in range(len(norms)):
        resumed = ClipGate(1.0)
        resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        assert resumed.state_dict() == whole.state_dict()
        opens = []
        for gate in (ClipGate(1.0), resumed):
            if gate is not resumed:
                for norm in norms[:i]:
                    gate.saw(norm)
            opens.append([gate.quiet])
            for norm in norms[i:]:
                gate.saw(norm)
                opens[-1].append(gate.quiet)
        assert opens[0] == opens[1]
        whole.saw(norms[i])
