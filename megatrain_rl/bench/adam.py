"""`megatrain-rl bench adam`: the native host AdamW against the memory it moves, and against torch's and DeepSpeed's.

A figure is parameters a second, the median of five passes over more memory than any cache holds, at the best of a few
thread counts. The other optimizers step as many fp32 parameters with fp32 gradients, which is their own natural layout.
"""

import argparse
import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megatrain_rl.bench.arguments import add_common, run_device
from megatrain_rl.bench.ceilings import host_copy_gb_s
from megatrain_rl.bench.flops import adamw_bytes_per_parameter
from megatrain_rl.bench.host_blocks import ADAMW, GRADIENT_SCALE, HostBlock, fill_with_noise, host_blocks, scalars
from megatrain_rl.bench.memory import MemoryMeter
from megatrain_rl.bench.record import Record
from megatrain_rl.config import StreamConfig
from megatrain_rl.host.machine import usable_cores
from megatrain_rl.ops.build import load_library
from megatrain_rl.optim.library import deepspeed_cpu_adam, fused_adamw

EXACT, BF16_MOMENTS = "exact", "bf16-moments"
THREADS = (8, 12, 14, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parameters", type=float, default=2.1e9, help="parameters stepped in a pass, at least")
    parser.add_argument("--passes", type=int, default=5, help="passes measured at each thread count, at least 5")
    parser.add_argument("--threads", type=int, action="append", help=f"thread counts; default {THREADS}")
    add_common(parser)


def run(arguments: argparse.Namespace, record: Record) -> None:
    if arguments.passes < 5:
        raise ValueError(f"--passes {arguments.passes}: must be at least 5, the figure is a median")
    threads = thread_counts(arguments.threads or THREADS)
    parameters = int(arguments.parameters)
    if parameters < 1:
        raise ValueError(f"--parameters {arguments.parameters}: must be at least 1")
    load_library("adamw")  # compile before the clock runs
    copy = host_copy_gb_s(record, quick=arguments.quick)
    memory = MemoryMeter()
    native = _native(StreamConfig(), EXACT, parameters, arguments, threads, copy, record)
    fused = _measure("torch AdamW(fused=True)", _torch_pass(parameters), parameters, arguments.passes, threads, record)
    record.result(EXACT, "torch_fused_params_per_s", fused.per_second, "1/s")
    record.result(EXACT, "vs_torch_fused", native.per_second / fused.per_second, "")
    _against_deepspeed(native, parameters, arguments.passes, threads, record)
    memory.report(record, EXACT)
    bf16 = StreamConfig(optimizer_state_dtype="bfloat16")
    _native(bf16, BF16_MOMENTS, parameters, arguments, threads, copy, record)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Parameters a second at the best thread count."""

    per_second: float
    threads: int


def thread_counts(wanted: list[int] | tuple[int, ...]) -> list[int]:
    """Keep those of `wanted` that this process has cores for; all its cores when it has fewer than the least of
    them."""
    if min(wanted) < 1:
        raise ValueError(f"--threads {min(wanted)}: must be at least 1")
    return [n for n in wanted if n <= usable_cores()] or [usable_cores()]


def _native(
    config: StreamConfig,
    case: str,
    parameters: int,
    arguments: argparse.Namespace,
    threads: list[int],
    copy_gb_s: float,
    record: Record,
) -> Rate:
    shape = "tiny" if arguments.quick else "qwen2.5-7b"
    dtype = config.optimizer_state_torch_dtype
    blocks = host_blocks(shape, parameters, dtype=dtype, pin=run_device().type == "cuda")
    try:
        total = sum(b.numel for b in blocks)
        name = f"native, {dtype} moments, {len(blocks)} blocks of {blocks[0].numel}"
        rate = _measure(name, _native_pass(blocks), total, arguments.passes, threads, record)
    finally:
        for block in blocks:
            block.close()
    moved = adamw_bytes_per_parameter(config)
    record.result(case, "params_per_s", rate.per_second, "1/s")
    record.result(case, "threads", rate.threads, "")
    record.result(case, "copy_bandwidth_fraction", rate.per_second * moved / (copy_gb_s * 1e9), "")
    return rate


def _native_pass(blocks: list[HostBlock]) -> Callable[[int], None]:
    steps = iter(range(1, 1 << 30))

    def one_pass(threads: int) -> None:
        constants = scalars(next(steps))
        for block in blocks:
            block.step(constants, threads)

    return one_pass


def _torch_pass(parameters: int) -> Callable[[int], None]:
    optimizer = fused_adamw(_fp32_parameters(parameters), ADAMW)
    return lambda threads: optimizer.step()


def _against_deepspeed(native: Rate, parameters: int, passes: int, threads: list[int], record: Record) -> None:
    try:
        optimizer = deepspeed_cpu_adam(_fp32_parameters(parameters), ADAMW)
    except Exception as error:  # not installed, or its op does not build here: no figure then, and the record says why
        record.say(
            f"DeepSpeedCPUAdam: not measured, {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        return
    rate = _measure("DeepSpeedCPUAdam", lambda threads: optimizer.step(), parameters, passes, threads, record)
    record.result(EXACT, "deepspeed_params_per_s", rate.per_second, "1/s")
    record.result(EXACT, "vs_deepspeed", native.per_second / rate.per_second, "")


def _fp32_parameters(parameters: int, *, each: int = 1 << 26) -> list[nn.Parameter]:
    """Parameters of 64 Mi elements, the size of a large matrix, with gradients."""
    tensors = []
    for start in range(0, parameters, each):
        tensor = nn.Parameter(torch.empty(min(each, parameters - start)))
        fill_with_noise(tensor.data, 0.02)
        tensor.grad = torch.empty_like(tensor)
        fill_with_noise(tensor.grad, GRADIENT_SCALE)
        tensors.append(tensor)
    return tensors


def _measure(
    name: str, one_pass: Callable[[int], None], parameters: int, passes: int, threads: list[int], record: Record
) -> Rate:
    """Time `passes` passes at each thread count, after one to warm up; returns the median at the best thread count."""
    before = torch.get_num_threads()
    rates = []
    try:
        for count in threads:
            _set_threads(count)
            one_pass(count)
            seconds = []
            for _ in range(passes):
                start = time.perf_counter()
                one_pass(count)
                seconds.append(time.perf_counter() - start)
            rates.append(Rate(per_second=parameters / statistics.median(seconds), threads=count))
            record.say(
                f"{name}, {parameters / 1e9:.3f} G parameters, {count} threads: {rates[-1].per_second / 1e9:.3f} Gparam/s, passes "
                + " ".join(f"{s:.3f}" for s in seconds)
                + " s"
            )
    finally:
        _set_threads(before)
    return max(rates, key=lambda rate: rate.per_second)


def _set_threads(count: int) -> None:
    torch.set_num_threads(count)
    # DeepSpeed's op is built against the system's OpenMP, not the one torch brings along; where there is none, nothing
    # uses it
    with contextlib.suppress(OSError):
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(count)
