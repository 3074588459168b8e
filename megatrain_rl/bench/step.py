"""`megatrain-rl bench step`: whole training steps of a real shape with random weights, timed, with memory by NVML."""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

import torch

from megatrain_rl.batch import pack_sequences
from megatrain_rl.bench.shapes import SHAPES, shape_config
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.objectives import NegativeLogLikelihood
from megatrain_rl.profiling import MemorySampler, environment
from megatrain_rl.trainer import StreamTrainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="qwen2.5-7b", help=", ".join(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per step")
    parser.add_argument("--mean-length", type=int, default=1024, help="mean sequence length; lengths vary around it")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", default="step", help="name of the case in the record")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", help="a setting of StreamConfig")


def run(arguments: argparse.Namespace) -> None:
    knobs = {}
    for item in arguments.set:
        name, _, value = item.partition("=")
        try:
            knobs[name] = json.loads(value)
        except json.JSONDecodeError:
            knobs[name] = value
    config = StreamConfig.from_mapping(knobs, prefix="--set ")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sampler = MemorySampler().start()
    started = time.perf_counter()
    trainer = StreamTrainer.from_config(
        shape_config(arguments.shape, layers=arguments.layers), config=config, adamw=AdamWConfig(lr=1e-6), device=device,
        seed=arguments.seed,
    )  # fmt: skip
    lines = [
        f"{arguments.shape}: {trainer.spec.num_parameters / 1e9:.2f} B parameters, {trainer.spec.num_layers} layers, "
        f"packs of {trainer.pack_tokens}, head chunk {trainer.plan.head_chunk(trainer.pack_tokens)}, ready in {time.perf_counter() - started:.1f} s"
    ]
    print(lines[0], flush=True)
    seconds = []
    for step in range(arguments.steps):
        seconds.append(_timed_step(trainer, arguments, step, lines))
    trainer.synchronize()
    sampler.stop()
    cuda_lines = _cuda_memory_lines() if device == "cuda" else []
    for line in cuda_lines:
        print(line, flush=True)
    results = [
        {"metric": "step_s", "value": round(sorted(seconds)[len(seconds) // 2], 3), "unit": "s"},
        {"metric": "trainer_process_peak_gib", "value": round(sampler.gpu_peak_bytes / 2**30, 2), "unit": "GiB"},
        {"metric": "host_rss_gib", "value": round(sampler.rss_peak_bytes / 2**30, 1), "unit": "GiB"},
        {
            "metric": "tokens_per_s",
            "value": round(arguments.tokens / sorted(seconds)[len(seconds) // 2]),
            "unit": "1/s",
        },
    ]
    for result in results:
        print(f"{arguments.case} {result['metric']} {result['value']} {result['unit']}", flush=True)
    if arguments.json:
        record = {"command": shlex.join(["megatrain-rl", *sys.argv[1:]]), **environment(), "raw": lines + cuda_lines}
        record["results"] = [{"case": arguments.case, **r} for r in results]
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    trainer.close()


def _timed_step(trainer: StreamTrainer, arguments: argparse.Namespace, step: int, lines: list[str]) -> float:
    """One forward, backward and update on fresh random sequences; the time runs until every weight is updated."""
    sequences = random_sequences(
        arguments.tokens, arguments.mean_length, trainer.spec.vocab_size, seed=arguments.seed + step
    )
    packs = pack_sequences(sequences, max_tokens=trainer.pack_tokens)
    start = time.perf_counter()
    out = trainer.forward_backward(packs, NegativeLogLikelihood(packs))
    result = trainer.optim_step()
    norm_known = time.perf_counter()
    trainer.synchronize()
    end = time.perf_counter()
    lines.append(
        f"step {step}: {end - start:.2f} s (gradients {norm_known - start:.2f}, optimizer {end - norm_known:.2f}), "
        f"{len(packs)} packs, loss {sum(out.losses):.4f}, grad norm {result.grad_norm:.3f}, stepped {result.stepped}"
    )
    print(lines[-1], flush=True)
    return end - start


def random_sequences(tokens: int, mean_length: int, vocab_size: int, *, seed: int) -> list[torch.Tensor]:
    """Random tokens in sequences of 0.5 to 1.5 times the mean length, `tokens` in all."""
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(mean_length * (0.5 + torch.rand((), generator=generator).item()))
        lengths.append(left if left < length + mean_length // 2 else length)
    return [torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths]


def _cuda_memory_lines() -> list[str]:
    gib = 2**30
    return [
        f"allocator peak {torch.cuda.max_memory_allocated() / gib:.2f} GiB allocated, "
        f"{torch.cuda.max_memory_reserved() / gib:.2f} GiB reserved; "
        f"{torch.cuda.memory_stats().get('num_alloc_retries', 0)} allocation retries"
    ]
