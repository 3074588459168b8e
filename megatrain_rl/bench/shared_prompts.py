"""`megatrain-rl bench shared-prompts`: an update on several answers to each prompt, with prompts computed once and not.

Both are timed in one process, on the same rows. How far the gradients of either are from fp32 is measured on a model of
the same width with few layers, whose exact gradients the trainer itself computes in fp32.
"""

import argparse
import dataclasses
import functools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain_rl.batch import PackedBatch, pack_sequences
from megatrain_rl.bench.arguments import add_common, add_model, add_settings, check_settle, read_config, run_device
from megatrain_rl.bench.ceilings import Ceilings, measure_ceilings
from megatrain_rl.bench.data import ADVANTAGE_STD, PolicyGradientSurrogate
from megatrain_rl.bench.flops import light_speed, mean_flops, step_traffic
from megatrain_rl.bench.memory import MemoryMeter
from megatrain_rl.bench.record import Record
from megatrain_rl.bench.series import report_speed, run_series
from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.bench.step import StepMode, one_step, random_trainer
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.objectives import ObjectiveOutput, TokenStats
from megatrain_rl.trainer import StreamTrainer


@dataclass(frozen=True, kw_only=True)
class SharedCase:
    """Prompts of so many tokens, each with so many answers of so many tokens."""

    name: str
    prompt: int
    answer: int
    answers: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, shape="qwen2.5-3b")
    parser.add_argument(
        "--case",
        action="append",
        metavar="NAME=PROMPTxANSWERxN",
        help="tokens of a prompt, of an answer, and answers to a prompt",
    )
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--steps", type=int, default=3, help="steps measured, at least 3")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--settle", type=int, default=4, help="steps before all others, see `bench step`")
    parser.add_argument("--check-layers", type=int, default=2, help="layers of the model whose gradients are compared")
    parser.add_argument("--seed", type=int, default=0)
    add_settings(parser)
    add_common(parser)


def run(arguments: argparse.Namespace, record: Record) -> None:
    cases = [parse_case(text) for text in arguments.case or ["shared-prompt-512x1024x8=512x1024x8"]]
    for option in ("prompts", "check_layers"):
        if getattr(arguments, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} {getattr(arguments, option)}: must be at least 1")
    if arguments.steps < 3 or arguments.warmup < 0:
        raise ValueError(f"--steps {arguments.steps} --warmup {arguments.warmup}: at least 3 and 0")
    check_settle(arguments)
    config = dataclasses.replace(read_config(arguments.set), share_prompts=True)
    hf_config = shape_config(arguments.shape, layers=arguments.layers)
    device = run_device()
    ceilings = measure_ceilings(device, record, quick=arguments.quick)
    with random_trainer(arguments, hf_config, config, AdamWConfig(lr=1e-6), device, record) as trainer:
        for i in range(arguments.settle):  # both kinds, so that layers are compiled for both
            packs = pack_rows(cases[0], trainer, arguments.prompts, seed=arguments.seed + i, share=i % 2 == 0)
            record.say(f"settle {i}: {_step_of(trainer, [packs], 0)}")
        for case in cases:
            _run_case(case, trainer, arguments, ceilings, record)
    for case in cases:
        _compare_gradients(case, arguments, config, device, record)


def parse_case(text: str) -> SharedCase:
    name, _, sizes = text.partition("=")
    numbers = sizes.split("x")
    if not name or len(numbers) != 3 or not all(n.isdecimal() and int(n) >= 1 for n in numbers):
        raise ValueError(f"--case {text}: must be NAME=PROMPTxANSWERxN, like shared-prompt-512x1024x8=512x1024x8")
    prompt, answer, answers = (int(n) for n in numbers)
    return SharedCase(name=name, prompt=prompt, answer=answer, answers=answers)


def rows(case: SharedCase, prompts: int, vocab_size: int, *, seed: int) -> list[Tensor]:
    """Random token ids of `prompts` groups of rows; each group begins with the same prompt."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tokens: int) -> Tensor:
        return torch.randint(0, vocab_size, (tokens,), generator=generator)

    return [
        torch.cat([prompt, draw(case.answer)])
        for prompt in (draw(case.prompt) for _ in range(prompts))
        for _ in range(case.answers)
    ]


def pack_rows(case: SharedCase, trainer: StreamTrainer, prompts: int, *, seed: int, share: bool) -> list[PackedBatch]:
    """Packs of a step. Log-probs are wanted from the prompt's last token on, as in RL."""
    data = rows(case, prompts, trainer.spec.vocab_size, seed=seed)
    return pack_sequences(
        data,
        max_tokens=trainer.pack_tokens,
        predict=[torch.arange(len(row)) >= case.prompt - 1 for row in data],
        prompt_lengths=[case.prompt if share else 0] * len(data),
        repeat_cost=trainer.plan.repeat_cost,
    )


def _step_of(trainer: StreamTrainer, batches: list[list[PackedBatch]], i: int) -> str:
    objective = PolicyGradientSurrogate(batches[i], seed=i, std=ADVANTAGE_STD)
    return one_step(trainer, StepMode(), batches[i], objective)


def _run_case(
    case: SharedCase, trainer: StreamTrainer, arguments: argparse.Namespace, ceilings: Ceilings, record: Record
) -> None:
    steps, warmup = arguments.steps, arguments.warmup
    tokens = arguments.prompts * case.answers * (case.prompt + case.answer)
    seconds = {}
    for share in (False, True):
        name = case.name if share else f"{case.name}-unshared"
        batches = [
            pack_rows(case, trainer, arguments.prompts, seed=arguments.seed + i, share=share)
            for i in range(warmup + steps)
        ]
        computed = sum(pack.num_computed for pack in batches[-1])
        record.say(f"{name}: {tokens} tokens a step, {computed} computed")
        memory = MemoryMeter()
        step = functools.partial(_step_of, trainer, batches)
        series = run_series(step, trainer.synchronize, warmup=warmup, steps=steps, say=record.say)
        seconds[share] = series.median
        flops = mean_flops(trainer.spec, batches[-steps:], train=True)
        sweeps = trainer.num_sweeps(batches[-1], train=True)
        light = light_speed(flops, step_traffic(trainer.spec, trainer.config, computed, sweeps=sweeps), ceilings)
        report_speed(record, name, series, tokens=tokens, flops=flops, light=light, ceilings=ceilings)
        memory.report(record, name)
    record.result(case.name, "speedup", seconds[False] / seconds[True], "")


def _compare_gradients(
    case: SharedCase, arguments: argparse.Namespace, config: StreamConfig, device: torch.device, record: Record
) -> None:
    """The error of the gradients against fp32, shared and not, of a group of answers."""
    hf_config = shape_config(arguments.shape, layers=arguments.check_layers)
    exact_config = dataclasses.replace(
        config, param_dtype="float32", grad_dtype="float32", attention="auto", compile=None, gpu_budget_gb=4 * config.gpu_budget_gb
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(arguments.seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
        model.cpu().save_pretrained(folder)
        del model

        def gradients(config: StreamConfig, *, share: bool) -> Mapping[str, Tensor]:
            trainer = StreamTrainer.from_pretrained(folder, config=config, adamw=AdamWConfig(), device=device)
            try:
                packs = pack_rows(case, trainer, 1, seed=arguments.seed, share=share)
                trainer.forward_backward(packs, _RowWeights(case, seed=arguments.seed))
                return {name: gradient.float().clone() for name, gradient in trainer.named_gradients()}
            finally:
                trainer.close()

        exact = gradients(exact_config, share=False)
        for share, metric in ((False, "gradient_error_unshared"), (True, "gradient_error")):
            found = gradients(config, share=share)
            difference = sum(float((found[n] - exact[n]).square().sum()) for n in exact) ** 0.5
            norm = sum(float(g.square().sum()) for g in exact.values()) ** 0.5
            record.result(case.name, metric, difference / norm, "")


class _RowWeights:
    """An objective that weighs the log-probs of each row by numbers of its own, so the cut does not change it."""

    def __init__(self, case: SharedCase, *, seed: int):
        shape = (case.answers, case.prompt + case.answer)
        self._weights = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / (shape[0] * shape[1])

    def __call__(self, stats: TokenStats, pack: PackedBatch) -> ObjectiveOutput:
        weights_T = self._weights[list(pack.sequence_ids)].flatten().to(stats.log_probs_T.device)
        return ObjectiveOutput(loss=(weights_T * stats.log_probs_T).sum())
