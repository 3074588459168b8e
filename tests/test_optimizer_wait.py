"""`StreamTrainer.optimizer_wait_s`: what readers of weights wait for the host optimizer, wherever they read them."""

import time

import pytest
import tiny

from megatrain_rl.config import StreamConfig
from megatrain_rl.trainer import StreamTrainer

BLOCK_S = 0.03
DATA = tiny.sequences((5, 9, 11))


def slowed(tmp_path):
    """A trainer whose optimizer takes `BLOCK_S` longer for each block, and that many blocks' seconds."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config(layers=3)), tmp_path), overlap_optimizer=False)
    step = trainer._optimizer._do

    def slow(block, job):
        time.sleep(BLOCK_S)
        step(block, job)

    trainer._optimizer._do = slow
    return trainer, BLOCK_S * len(trainer.spec.blocks)


def update(trainer) -> None:
    trainer.forward_backward(tiny.packs(DATA), tiny.WeightedLoss(tiny.token_weights(DATA)))
    trainer.optim_step()


READERS = {
    "next forward": lambda t: t.log_probs(tiny.packs(DATA)),
    "weight sync": lambda t: list(t.named_parameters()),
    "whole update": lambda t: t.synchronize(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_reader_pays_for_the_update_that_is_running(tmp_path, read):
    trainer, busy_s = slowed(tmp_path)
    assert trainer.optimizer_wait_s == 0.0
    update(trainer)
    before = trainer.optimizer_wait_s
    started = time.perf_counter()
    read(trainer)
    elapsed = time.perf_counter() - started
    waited = trainer.optimizer_wait_s - before
    # optim_step returned at once, perhaps a little late for this reader
    assert 0.7 * busy_s < waited <= elapsed
    read(trainer)
    assert trainer.optimizer_wait_s - before - waited < 0.1 * BLOCK_S, "nothing runs any more"
    trainer.close()


def test_forward_only_never_waits(tmp_path):
    directory = tiny.saved(tiny.model(tiny.config(layers=2)), tmp_path)
    trainer = StreamTrainer.from_pretrained(directory, config=StreamConfig(**tiny.FP32), adamw=None, device="cpu")
    trainer.log_probs(tiny.packs(DATA))
    assert trainer.optimizer_wait_s == 0.0
    trainer.close()
