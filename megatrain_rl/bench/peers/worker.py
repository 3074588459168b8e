"""`python -m megatrain_rl.bench.peers.worker`: one engine, started by run.py. Prints one JSON line per case.

Each engine has a process of its own: its memory is fresh, and no library sees another's allocator or process group.
"""

import argparse
import json
import os
import socket
import sys
import time

import torch

from megatrain_rl.batch import PackedBatch
from megatrain_rl.bench.arguments import Case, parse_case, read_config, run_device
from megatrain_rl.bench.data import PolicyGradientSurrogate, packed_batches
from megatrain_rl.bench.memory import GIB, MemoryMeter
from megatrain_rl.bench.peers.engine import PeerEngine
from megatrain_rl.bench.series import run_series
from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.bench.step import StepMode
from megatrain_rl.host.machine import usable_cores

# Before a line that `run` reads; everything else an engine prints is its own.
PREFIX = "PEER:: "
ENGINES = ("zero3", "fsdp2", "stream", "reference")


def main() -> None:
    arguments = _parse()
    _single_process_group()
    device = run_device()
    if device.type == "cuda":
        torch.cuda.set_device(0)
    torch.set_num_threads(usable_cores())  # the host optimizers' threads
    engine = make_engine(arguments, device)
    _report({"settings": engine.settings})
    cases = [parse_case(text) for text in arguments.case]
    for batch in make_batches(engine, cases[0], arguments, count=arguments.settle):
        started = time.perf_counter()
        text = engine.step(*batch)
        _report({"settle": f"settle: {time.perf_counter() - started:.3f} s, {text}"})
    for case in cases:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # a case starts from what the engine holds, not from the peak of loading or the last case
        _report(run_case(engine, case, arguments))
    engine.close()


def make_engine(arguments: argparse.Namespace, device: torch.device) -> PeerEngine:
    config = shape_config(arguments.shape, layers=arguments.layers)
    sizes = dict(micro_batch_tokens=arguments.micro_batch_tokens, seed=arguments.seed)
    if arguments.engine == "zero3":
        from megatrain_rl.bench.peers.zero3 import Zero3Engine

        return Zero3Engine(config, device, **sizes)
    if arguments.engine == "fsdp2":
        from megatrain_rl.bench.peers.fsdp2 import Fsdp2Engine

        return Fsdp2Engine(config, device, **sizes)
    from megatrain_rl.bench.peers.stream import StreamEngine

    mode = StepMode(schedule="reference", overlap=False) if arguments.engine == "reference" else StepMode()
    return StreamEngine(config, read_config(arguments.set), mode, device, **sizes)


def make_batches(
    engine: PeerEngine, case: Case, arguments: argparse.Namespace, *, count: int
) -> list[tuple[list[PackedBatch], PolicyGradientSurrogate]]:
    """Packs and objectives of `count` steps, made before the clock runs."""
    vocab = shape_config(arguments.shape).vocab_size
    data = packed_batches(
        case.tokens, arguments.mean_length, vocab, max_tokens=engine.pack_tokens, seed=arguments.seed, count=count
    )
    return [(packs, PolicyGradientSurrogate(packs, seed=arguments.seed + i)) for i, packs in enumerate(data)]


def run_case(engine: PeerEngine, case: Case, arguments: argparse.Namespace) -> dict:
    """Time one case; returns its figures, which run.py puts into the record."""
    batches = make_batches(engine, case, arguments, count=arguments.warmup + arguments.steps)
    lines: list[str] = []
    memory = MemoryMeter()
    series = run_series(
        lambda i: engine.step(*batches[i]),
        engine.finish,
        warmup=arguments.warmup,
        steps=arguments.steps,
        say=lines.append,
    )
    memory.stop()
    return {
        "case": case.name,
        "tokens_per_s": case.tokens / series.median,
        "peak_gib": memory.gpu_peak_bytes / GIB,
        "host_rss_gib": memory.rss_peak_bytes / GIB,
        "lines": lines,
    }


def _report(content: dict) -> None:
    print(PREFIX + json.dumps(content), flush=True)


def _single_process_group() -> None:
    """Set the environment variables of a world of one process, which listens on the loopback interface only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback,
    }  # fmt: skip


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--case", action="append", required=True)
    for name in ("mean-length", "settle", "steps", "warmup", "seed", "micro-batch-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--set", action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
