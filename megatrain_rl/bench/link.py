"""`megatrain-rl bench link`: the link alone, and beside the host optimizer, which wants the same memory."""

import argparse
import statistics
import threading
import time

import torch

from megatrain_rl.bench.arguments import add_common, run_device
from megatrain_rl.bench.ceilings import LinkProbe, host_copy_gb_s
from megatrain_rl.bench.host_blocks import HostBlock, host_blocks, scalars
from megatrain_rl.bench.memory import MemoryMeter
from megatrain_rl.bench.record import Record
from megatrain_rl.host.machine import optimizer_threads

CASE = "link"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=optimizer_threads(), help="of the host optimizer")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long the optimizer is timed alone")
    add_common(parser)


def run(arguments: argparse.Namespace, record: Record) -> None:
    if arguments.threads < 1:
        raise ValueError(f"--threads {arguments.threads}: must be at least 1")
    device = run_device()
    host_copy = host_copy_gb_s(record, quick=arguments.quick)
    memory = MemoryMeter()
    probe = LinkProbe(device, quick=arguments.quick)
    # two layers: more than the processor's caches, so that each pass comes from memory
    shape, parameters = ("tiny", 1) if arguments.quick else ("qwen2.5-7b", 400_000_000)
    blocks = host_blocks(shape, parameters, dtype=torch.float32, pin=device.type == "cuda")
    try:
        record.result(CASE, "h2d_gb_s", probe.h2d(), "GB/s")
        record.result(CASE, "d2h_gb_s", probe.d2h(), "GB/s")
        record.result(CASE, "both_gb_s", probe.both(), "GB/s")
        record.result(CASE, "host_copy_gb_s", host_copy, "GB/s")
        load = _AdamWLoad(blocks, arguments.threads)
        time.sleep(arguments.seconds)
        record.result(CASE, "adamw_alone_gparams_s", load.stop() / 1e9, "Gparam/s")
        load = _AdamWLoad(blocks, arguments.threads)
        both = statistics.median(probe.both() for _ in range(1 if arguments.quick else 5))
        record.result(CASE, "adamw_while_both_gparams_s", load.stop() / 1e9, "Gparam/s")
        record.result(CASE, "both_while_adamw_gb_s", both, "GB/s")
        record.say(
            f"host optimizer: native AdamW, {arguments.threads} threads, {len(blocks)} blocks of {blocks[0].numel}"
        )
        memory.report(record, CASE)
    finally:
        probe.close()
        for block in blocks:
            block.close()


class _AdamWLoad:
    """Steps the blocks over and over on a thread from construction to `stop`."""

    def __init__(self, blocks: list[HostBlock], threads: int):
        self._blocks = blocks
        self._threads = threads
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._parameters = 0
        self._started = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="adamw-load", daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """End it; returns parameters a second. RuntimeError for what went wrong on the thread."""
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise RuntimeError("the host optimizer failed under load") from self._error
        return self._parameters / (time.perf_counter() - self._started)

    def _run(self) -> None:
        step = 0
        try:
            while not self._stop.is_set() or step == 0:  # one pass at least, however short the load
                step += 1
                for block in self._blocks:
                    block.step(scalars(step), self._threads)
                    self._parameters += block.numel
        except BaseException as error:  # raised by stop()
            self._error = error
