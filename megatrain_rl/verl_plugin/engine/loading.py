"""A trainer loads its model on a thread while VERL starts the rollout engine. Used by engine.py.

GPU memory is taken before `load` returns, because a rollout engine measures the free memory when it starts. Then host
RAM is pinned, weights are read and layers are compiled. For a large model that takes minutes, as long as the rollout
engine's start.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import torch

from megatrain_rl.host.pinned import where_memory_lies
from megatrain_rl.trainer import StreamTrainer

log = logging.getLogger(__name__)

# A trainer plans with the memory that is free, so the one before it must have taken its memory.
_one_at_a_time = threading.Lock()


def load(
    model_dir: str, *, check: Callable[[StreamTrainer], None], device: str, **settings: Any
) -> "Future[StreamTrainer]":
    """Begin `StreamTrainer.from_pretrained(model_dir, ...)` and return as soon as the trainer has its GPU memory.

    The future's result is the trainer, once it is ready to train. An error of loading is the future's error, and it is
    logged as well. device: "cuda" means the caller's current device.

    check: called with the trainer, which has its plan, before the model is loaded. An error that it raises, or that the
    trainer raises by then, is raised here.
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
        if lies := where_memory_lies():
            print(lies, flush=True)
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
    futures: list[Future[Any]] = [reserved, loaded]
    done, _ = wait(futures, return_when=FIRST_COMPLETED)
    for future in done:
        future.result()
    return loaded
