"""`megatrain-rl bench step`: whole training steps of a real shape with random weights, timed, with memory by NVML.

series.py says how a step is timed; flops.py and ceilings.py say what its figures are divided by. The ceilings are
measured in the same process, before the weights are loaded.
"""

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PretrainedConfig

from megatrain_rl.batch import PackedBatch
from megatrain_rl.bench.arguments import (
    Case,
    add_cases,
    add_common,
    add_model,
    add_settings,
    check_settle,
    read_cases,
    read_config,
    run_device,
)
from megatrain_rl.bench.ceilings import Ceilings, measure_ceilings
from megatrain_rl.bench.data import ADVANTAGE_STD, PolicyGradientSurrogate, packed_batches
from megatrain_rl.bench.flops import light_speed, mean_flops, step_traffic
from megatrain_rl.bench.memory import MemoryMeter
from megatrain_rl.bench.record import Record, check_writable
from megatrain_rl.bench.series import report_speed, run_series
from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.bench.trace import draw_timeline, profile_step
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.objectives import NegativeLogLikelihood, Objective
from megatrain_rl.trainer import StreamTrainer

# The reference implementation keeps the input of every fourth layer.
REFERENCE_INTERVAL = 4


@dataclass(frozen=True, kw_only=True)
class StepMode:
    """The order of work in a step.

    schedule: "layer-major" is this package's. "reference" is that of the implementation it is compared with: one sweep
    per micro-batch, so weights cross the link about three times for each (forward, recompute, backward), and an
    optimizer that begins after backward and ends before the next step.
    overlap: the optimizer may start beneath backward.
    """

    schedule: Literal["layer-major", "reference"] = "layer-major"
    overlap: bool = True

    def configure(self, config: StreamConfig, micro_batch_tokens: int) -> StreamConfig:
        if self.schedule == "layer-major":
            return config
        if micro_batch_tokens < 1:
            raise ValueError(f"--micro-batch-tokens {micro_batch_tokens}: must be at least 1")
        return dataclasses.replace(config, checkpoint_interval=REFERENCE_INTERVAL, pack_tokens=micro_batch_tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, shape="qwen2.5-7b")
    add_cases(parser, steps=5, warmup=2)
    parser.add_argument("--objective", choices=("surrogate", "nll"), default="surrogate", help="what is trained")
    parser.add_argument(
        "--advantage-std", type=float, default=ADVANTAGE_STD, help="of the surrogate; a norm above 1 would be clipped"
    )
    parser.add_argument("--no-overlap", action="store_true", help="the optimizer starts after backward")
    parser.add_argument("--schedule", choices=("layer-major", "reference"), default="layer-major")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096, help="of the reference schedule")
    parser.add_argument(
        "--settle",
        type=int,
        default=6,
        help="steps of the first case before all others: while second moments know only a few gradients, an update beneath backward "
        "leaves many elements for a second look",
    )
    parser.add_argument("--trace", type=Path, help="profile one more step of the last case into this chrome trace")
    parser.add_argument("--trace-picture", type=Path, help="draw that trace's timeline into this PNG")
    add_settings(parser)
    add_common(parser)


def run(arguments: argparse.Namespace, record: Record) -> None:
    cases = read_cases(arguments, default=["16k=16384"])
    mode = StepMode(schedule=arguments.schedule, overlap=not arguments.no_overlap)
    config = mode.configure(read_config(arguments.set), arguments.micro_batch_tokens)
    hf_config = shape_config(arguments.shape, layers=arguments.layers)
    for path, option in ((arguments.trace, "--trace"), (arguments.trace_picture, "--trace-picture")):
        check_writable(path, option)
    if arguments.trace_picture and not arguments.trace:
        raise ValueError("--trace-picture needs --trace, which it is drawn from")
    check_settle(arguments)
    device = run_device()
    ceilings = measure_ceilings(device, record, quick=arguments.quick)
    with random_trainer(arguments, hf_config, config, AdamWConfig(lr=1e-6), device, record) as trainer:
        work = Workload(cases[0], trainer, mode, arguments, count=arguments.settle)
        for i in range(arguments.settle):
            record.say(f"settle {i}: {work.step(i)}")
        for case in cases:
            _run_case(case, trainer, mode, arguments, ceilings, record)
        if arguments.trace:
            _trace(cases[-1], trainer, mode, arguments, record)


@contextlib.contextmanager
def random_trainer(
    arguments: argparse.Namespace,
    hf_config: PretrainedConfig,
    config: StreamConfig,
    adamw: AdamWConfig | None,
    device: torch.device,
    record: Record,
) -> Iterator[StreamTrainer]:
    """A trainer with random weights, which is described in the record once it is ready and closed at the end."""
    started = time.perf_counter()
    trainer = StreamTrainer.from_config(hf_config, config=config, adamw=adamw, device=device, seed=arguments.seed)
    try:
        record.say(_describe(arguments.shape, trainer, time.perf_counter() - started))
        yield trainer
    finally:
        trainer.close()


def _describe(shape: str, trainer: StreamTrainer, ready_s: float) -> str:
    packs = trainer.pack_tokens
    return (
        f"{shape}: {trainer.spec.num_parameters / 1e9:.2f} B parameters, {trainer.spec.num_layers} layers, packs of {packs}, "
        f"head chunk {trainer.plan.head_chunk(packs)}, {trainer.config}, ready in {ready_s:.1f} s"
    )


class Workload:
    """The steps of one case, each on data of its own that was made before the clock runs."""

    def __init__(
        self, case: Case, trainer: StreamTrainer, mode: StepMode, arguments: argparse.Namespace, *, count: int
    ):
        self._trainer = trainer
        self._mode = mode
        self._batches = packed_batches(
            case.tokens, arguments.mean_length, trainer.spec.vocab_size,
            max_tokens=trainer.pack_tokens, seed=arguments.seed, count=count,
        )  # fmt: skip
        self._objectives: list[Objective] = [
            NegativeLogLikelihood(packs)
            if arguments.objective == "nll"
            else PolicyGradientSurrogate(packs, seed=arguments.seed + i, std=arguments.advantage_std)
            for i, packs in enumerate(self._batches)
        ]

    def step(self, i: int) -> str:
        return one_step(self._trainer, self._mode, self._batches[i], self._objectives[i])

    def mean_flops(self, steps: int) -> float:
        """Useful FLOPs of a step, the mean over the last `steps` steps."""
        return mean_flops(self._trainer.spec, self._batches[-steps:], train=True)

    def sweeps(self) -> int:
        # the reference schedule is held against the same bound: what it moves more is its own choice
        return 1 if self._mode.schedule == "reference" else self._trainer.num_sweeps(self._batches[-1], train=True)


def one_step(trainer: StreamTrainer, mode: StepMode, packs: list[PackedBatch], objective: Objective) -> str:
    """Run forward, backward and update; returns when `optim_step` does (the reference schedule: when the weights are
    updated) with what to print of it. RuntimeError if the update was skipped."""
    start = time.perf_counter()
    if mode.schedule == "reference":
        losses = [x for pack in packs for x in trainer.forward_backward([pack], objective, final=False).losses]
    else:
        losses = trainer.forward_backward(packs, objective, final=mode.overlap).losses
    backward_done = time.perf_counter()
    result = trainer.optim_step()
    if not result.stepped:
        raise RuntimeError(f"a step was skipped (gradient norm {result.grad_norm}): its time would mean nothing")
    if mode.schedule == "reference":
        trainer.synchronize()
    return (
        f"forward_backward {backward_done - start:.3f} s, rest {time.perf_counter() - backward_done:.3f} s, {len(packs)} packs, "
        f"loss {sum(losses):.5f}, grad norm {result.grad_norm:.4f}"
    )


def _run_case(
    case: Case,
    trainer: StreamTrainer,
    mode: StepMode,
    arguments: argparse.Namespace,
    ceilings: Ceilings,
    record: Record,
) -> None:
    steps, warmup = arguments.steps, arguments.warmup
    work = Workload(case, trainer, mode, arguments, count=warmup + steps)
    record.say(f"{case.name}: {case.tokens} tokens a step, {mode}")
    memory = MemoryMeter()
    series = run_series(work.step, trainer.synchronize, warmup=warmup, steps=steps, say=record.say)
    flops = work.mean_flops(steps)
    traffic = step_traffic(trainer.spec, trainer.config, case.tokens, sweeps=work.sweeps())
    light = light_speed(flops, traffic, ceilings)
    report_speed(record, case.name, series, tokens=case.tokens, flops=flops, light=light, ceilings=ceilings)
    memory.report(record, case.name)


def _trace(case: Case, trainer: StreamTrainer, mode: StepMode, arguments: argparse.Namespace, record: Record) -> None:
    work = Workload(case, trainer, mode, arguments, count=2)
    work.step(0)  # its optimizer runs beneath the forward of the step that is traced, as in the middle of a run
    trace = profile_step(lambda: work.step(1), trainer.synchronize, arguments.trace)
    record.say(f"trace of one step of {case.name}: {arguments.trace.name}")
    if arguments.trace_picture:
        intervals = [(i.start, i.end) for i in trainer.optimizer_intervals()]
        title = f"{arguments.shape}, {case.tokens} tokens a step"
        draw_timeline(trace, arguments.trace_picture, title=title, host_intervals=intervals)
