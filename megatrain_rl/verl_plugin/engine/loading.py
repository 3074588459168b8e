"""A trainer that loads its model on a thread while VERL starts the rollout engine. Used by engine.py.

GPU memory is taken before `load` returns, since a rollout engine measures what is free when it starts. What follows takes minutes for a
large model, as long as the engine's start: host RAM is pinned, weights are read, layers are compiled.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import torch

from megatrain_rl.trainer import StreamTrainer

log = logging.getLogger(__name__)

# What one trainer takes, the next must see when it plans.
_one_at_a_time = threading.Lock()


def load(
    model_dir: str, *, check: Callable[[StreamTrainer], None], device: str, **settings: Any
) -> "Future[StreamTrainer]":
    """Returns once the trainer of `StreamTrainer.from_pretrained(model_dir, ...)` has its GPU memory; the future has the trainer when it is
    ready to train, or the error, which is logged as well. device: "cuda" is the caller's current one.

    check: sees the trainer's plan before the model is loaded. What it raises, and what the trainer refuses by then, is raised here.
    """
    reserved: Future[None] = Future()
    loaded: Future[StreamTrainer] = Future()
    gpu = torch.cuda.current_device() if device == "cuda" else None

    def on_reserved(trainer: StreamTrainer) -> None:
        check(trainer)
        print("\n".join(trainer.plan.table()), flush=True)  # VERL's processes show no log of level INFO
        reserved.set_result(None)

    def work() -> StreamTrainer:
        if gpu is not None:
            torch.cuda.set_device(gpu)  # each thread has its own
        began = time.monotonic()
        trainer = StreamTrainer.from_pretrained(model_dir, on_reserved=on_reserved, device=device, **settings)
        try:
            read = time.monotonic()
            trainer.warm_up()
        except BaseException:
            trainer.close()
            raise
        # beside VERL's own start, whose phases startup_times.py prints
        print(f"trainer: loaded in {read - began:.1f} s, warmed up in {time.monotonic() - read:.1f} s", flush=True)
        return trainer

    def run() -> None:
        try:
            with _one_at_a_time:
                trainer = work()
        except BaseException as error:
            if reserved.done():  # the caller has gone on, and asks for the trainer only minutes later
                log.error("the model could not be loaded", exc_info=True)
            loaded.set_exception(error)
        else:
            loaded.set_result(trainer)

    # a daemon: an interpreter that ends does not wait for a model it no longer wants
    threading.Thread(target=run, name="load-model", daemon=True).start()
    done, _ = wait([reserved, loaded], return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
    return loaded
