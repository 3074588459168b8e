"""`megatrain-rl bench logprob`: forward only, as for old and reference log-probs.

The trainer has no gradients and no optimizer.
"""

import argparse

from megatrain_rl.bench.arguments import (
    Case,
    add_cases,
    add_common,
    add_model,
    add_settings,
    read_cases,
    read_config,
    run_device,
)
from megatrain_rl.bench.ceilings import Ceilings, measure_ceilings
from megatrain_rl.bench.data import packed_batches
from megatrain_rl.bench.flops import forward_traffic, light_speed, mean_flops
from megatrain_rl.bench.memory import MemoryMeter
from megatrain_rl.bench.record import Record
from megatrain_rl.bench.series import report_speed, run_series
from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.bench.step import random_trainer
from megatrain_rl.trainer import StreamTrainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, shape="qwen2.5-7b")
    add_cases(parser, steps=5, warmup=2)
    add_settings(parser)
    add_common(parser)


def run(arguments: argparse.Namespace, record: Record) -> None:
    cases = read_cases(arguments, default=["32k=32768"])
    config = read_config(arguments.set)
    hf_config = shape_config(arguments.shape, layers=arguments.layers)
    device = run_device()
    ceilings = measure_ceilings(device, record, quick=arguments.quick)
    with random_trainer(arguments, hf_config, config, None, device, record) as trainer:
        for case in cases:
            _run_case(case, trainer, arguments, ceilings, record)


def _run_case(
    case: Case, trainer: StreamTrainer, arguments: argparse.Namespace, ceilings: Ceilings, record: Record
) -> None:
    warmup, steps, spec = arguments.warmup, arguments.steps, trainer.spec
    batches = packed_batches(
        case.tokens, arguments.mean_length, spec.vocab_size,
        max_tokens=trainer.pack_tokens, seed=arguments.seed, count=warmup + steps,
    )  # fmt: skip

    def step(i: int) -> str:
        stats = trainer.log_probs(batches[i])  # on the CPU when it returns, so nothing is left running
        mean = sum(float(s.log_probs_T.sum()) for s in stats) / case.tokens
        return f"{len(batches[i])} packs, mean log-prob {mean:.4f}"

    memory = MemoryMeter()
    series = run_series(step, trainer.synchronize, warmup=warmup, steps=steps, say=record.say)
    useful = mean_flops(spec, batches[-steps:], train=False)
    sweeps = trainer.num_sweeps(batches[-1], train=False)
    light = light_speed(useful, forward_traffic(spec, trainer.config, case.tokens, sweeps=sweeps), ceilings)
    report_speed(record, case.name, series, tokens=case.tokens, flops=useful, light=light, ceilings=ceilings)
    memory.report(record, case.name)
