"""`megatrain-rl bench head`: the output-matrix phase alone, against the matrix products in it.

Shapes: P predicted tokens, C tokens of a chunk, V vocabulary, H hidden size.
"""

import argparse
import statistics

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatrain_rl.bench.arguments import add_common, add_model, run_device
from megatrain_rl.bench.ceilings import matmul_tflops, timed
from megatrain_rl.bench.memory import MemoryMeter
from megatrain_rl.bench.record import Record
from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.head import Head, HeadStats, chunks

CASE = "head"
READINGS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, shape="qwen2.5-7b")
    parser.add_argument("--tokens", type=int, default=16384, help="predicted tokens")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens whose logits exist at once")
    parser.add_argument(
        "--no-compile", action="store_true", help="elementwise parts as torch runs them (CUDA compiles)"
    )
    parser.add_argument("--entropy", action="store_true", help="with entropies and their gradient")
    add_common(parser)


def run(arguments: argparse.Namespace, record: Record) -> None:
    for name in ("tokens", "chunk"):
        if vars(arguments)[name] < 1:
            raise ValueError(f"--{name} {vars(arguments)[name]}: must be at least 1")
    config = shape_config(arguments.shape, layers=arguments.layers)
    device = run_device()
    ceiling, _ = matmul_tflops(device, record, quick=arguments.quick)
    head = Head(compile=device.type == "cuda" and not arguments.no_compile)
    phase = _HeadPhase(head, config, arguments, device)
    memory = MemoryMeter()
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    operations = {
        "forward": phase.forward, "forward_matmul": phase.forward_matmul,
        "forward_backward": phase.forward_backward, "forward_backward_matmul": phase.forward_backward_matmul,
    }  # fmt: skip
    seconds = {}
    for name, operation in operations.items():
        # the first two warm up: a compiled kernel is made anew once it has seen a second size
        readings = [timed(device, operation, 2) for _ in range(READINGS + 2)][2:]
        seconds[name] = statistics.median(readings)
        record.say(f"{name}: {seconds[name] * 1e3:.2f} ms, readings {' '.join(f'{s * 1e3:.2f}' for s in readings)}")
        if device.type == "cuda" and name == "forward_backward":
            peak = torch.cuda.max_memory_allocated() - held
            record.result(CASE, "scratch_peak_gib", peak / 2**30, "GiB")
    flops = 2 * arguments.tokens * config.vocab_size * config.hidden_size
    for name, products in (("forward", 1), ("forward_backward", 3)):
        record.result(CASE, f"{name}_ms", seconds[name] * 1e3, "ms")
        record.result(CASE, f"{name}_matmul_ms", seconds[f"{name}_matmul"] * 1e3, "ms")
        record.result(CASE, f"{name}_vs_matmul", seconds[name] / seconds[f"{name}_matmul"], "")
        tflops = products * flops / seconds[name] / 1e12
        record.result(CASE, f"{name}_useful_tflops", tflops, "TFLOP/s")
        record.result(CASE, f"{name}_matmul_fraction", tflops / ceiling, "")
    memory.report(record, CASE)


class _HeadPhase:
    """The package's head, and the matrix products that no implementation of it can leave out. Those are the logits, and
    for the way back the gradients of hidden states and matrix. Recomputed logits are not among them."""

    def __init__(self, head: Head, config: PretrainedConfig, arguments: argparse.Namespace, device: torch.device):
        generator = torch.Generator(device=device).manual_seed(0)
        vocab, hidden, tokens, chunk = config.vocab_size, config.hidden_size, arguments.tokens, arguments.chunk

        def normal(*shape: int, scale: float) -> Tensor:
            return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()

        self._hidden_PH = normal(tokens, hidden, scale=1.0)
        self._weight_VH = normal(vocab, hidden, scale=0.02)
        self._sum_VH = torch.zeros(vocab, hidden, device=device)
        self._targets_P = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
        self._temperature_P = torch.ones(tokens, device=device)
        self._grad_P = torch.randn(tokens, generator=generator, device=device) / tokens
        self._entropy = arguments.entropy
        self._grad_entropy_P = self._grad_P * 0.01 if arguments.entropy else None
        self._head = head
        self._chunk = chunk
        self._logits_CV = normal(min(chunk, tokens), vocab, scale=1.0)

    def forward(self) -> HeadStats:
        parts = [self._head.forward(*self._inputs(c), entropy=self._entropy) for c in self._chunks()]
        return HeadStats.concatenated(parts, entropy=self._entropy, device=self._hidden_PH.device)

    def forward_backward(self) -> None:
        stats = self.forward()
        for c in self._chunks():
            grad_entropy_C = None if self._grad_entropy_P is None else self._grad_entropy_P[c]
            self._head.backward(*self._inputs(c), stats[c], self._grad_P[c], grad_entropy_C, self._sum_VH)

    def _chunks(self) -> list[slice]:
        return chunks(self._hidden_PH.shape[0], self._chunk)

    def _inputs(self, c: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._hidden_PH[c], self._weight_VH, self._targets_P[c], self._temperature_P[c]

    def forward_matmul(self) -> None:
        for hidden_CH in self._hidden_PH.split(self._chunk):
            torch.mm(hidden_CH, self._weight_VH.t(), out=self._logits_CV[: len(hidden_CH)])

    def forward_backward_matmul(self) -> None:
        self.forward_matmul()
        for hidden_CH in self._hidden_PH.split(self._chunk):
            grad_CV = self._logits_CV[: len(hidden_CH)]
            torch.mm(grad_CV, self._weight_VH)
            torch.mm(grad_CV.t(), hidden_CH)
