"""`StreamTrainer.optimizer_wait_s`: what readers of weights wait for the host optimizer, wherever they read them.

Time is counted and not measured. One block takes the optimizer one second of a clock that moves only while a reader
waits: the optimizer begins a block when somebody waits for it.
"""

import threading
import types

import pytest
import tiny

from megatrain_rl.config import StreamConfig
from megatrain_rl.host import store
from megatrain_rl.optim import host_adamw
from megatrain_rl.trainer import StreamTrainer

DATA = tiny.sequences((5, 9, 11))


class Clock:
    """Whoever waits reads the clock before and after: between its first and its second reading the caller's thread
    waits."""

    def __init__(self):
        self._caller = threading.current_thread()
        self._changed = threading.Condition()
        self._waits = False
        self._now = 0

    def perf_counter(self) -> float:
        with self._changed:
            if threading.current_thread() is self._caller:
                self._waits = not self._waits
                self._changed.notify_all()
            return self._now

    def work_for_a_second(self) -> None:
        """On the optimizer's thread: not before the caller waits, and while it does."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waits, timeout=60), "nobody waits for the optimizer"
            self._now += 1


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (store, host_adamw):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=made.perf_counter))
    return made


def slowed(tmp_path, clock: Clock) -> StreamTrainer:
    """A trainer whose optimizer takes a second for each block."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config(layers=3)), tmp_path), overlap_optimizer=False)
    step = trainer._optimizer._do

    def slow(block, job):
        clock.work_for_a_second()
        step(block, job)

    trainer._optimizer._do = slow
    return trainer


def update(trainer) -> None:
    trainer.forward_backward(tiny.packs(DATA), tiny.WeightedLoss(tiny.token_weights(DATA)))
    trainer.optim_step()


READERS = {
    "next forward": lambda t: t.log_probs(tiny.packs(DATA)),
    "weight sync": lambda t: list(t.named_parameters()),
    "whole update": lambda t: t.synchronize(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_reader_pays_for_the_update_that_is_running(tmp_path, clock, read):
    trainer = slowed(tmp_path, clock)
    assert trainer.optimizer_wait_s == 0
    update(trainer)
    assert trainer.optimizer_wait_s == 0, "optim_step returns at once"
    read(trainer)
    assert trainer.optimizer_wait_s == len(trainer.spec.blocks)
    read(trainer)
    assert trainer.optimizer_wait_s == len(trainer.spec.blocks), "nothing runs any more"
    trainer.close()


def test_forward_only_never_waits(tmp_path):
    directory = tiny.saved(tiny.model(tiny.config(layers=2)), tmp_path)
    trainer = StreamTrainer.from_pretrained(directory, config=StreamConfig(**tiny.FP32), adamw=None, device="cpu")
    trainer.log_probs(tiny.packs(DATA))
    assert trainer.optimizer_wait_s == 0.0
    trainer.close()
