"""Weights of a real StreamTrainer pushed into a real vLLM; measured here, judged by test_vllm.py. Runs where vLLM is.

usage: sync_checks.py FOLDER cpu|cuda tied|untied

Writes FOLDER/result.json: one entry for each check. The model is tiny but its vocabulary is not, so that its embedding
is larger than the smallest transfer bucket.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path

import psutil
import torch
from resident import Answer, ResidentEngine, plain_log_probs
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer

from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.objectives import NegativeLogLikelihood
from megatrain_rl.trainer import StreamTrainer
from megatrain_rl.verl_plugin.engine.weight_sync import stream_weights

sys.path.append(str(Path(__file__).parents[1]))
import tiny

VOCAB = 8192
PROMPT = torch.randint(0, VOCAB, (80,), generator=torch.Generator().manual_seed(3)).tolist()
# The embedding takes 4 MiB. VERL needs CUDA IPC for a tensor larger than its bucket.
BUCKETS = {"cpu": [5, 64], "cuda": [1, 64]}
# Ends a sync that hangs; far beyond the limit that the sync itself has.
HANG_SECONDS = 60


class Checks:
    """A trainer, a plain model with its weights, and an engine that was started on their common files."""

    def __init__(self, folder: Path, device: str, tied: bool):
        self.device = device
        self.folder = folder
        self.segments = watched_segments()
        config = tiny.config(
            layers=2, tied=tied, vocab_size=VOCAB, hidden_size=128, intermediate_size=256, head_dim=32,
            max_position_embeddings=512, initializer_range=0.3,
        )  # fmt: skip
        self.model_dir = str(tiny.saved(tiny.model(config), folder / "model"))
        self.plain = AutoModelForCausalLM.from_pretrained(
            self.model_dir, dtype=torch.float32, attn_implementation="eager"
        ).to(device)
        self.trainer = StreamTrainer.from_pretrained(
            self.model_dir,
            config=StreamConfig(**tiny.FP32, gpu_budget_gb=3, pack_tokens=512, cpu_threads=1, optimizer="torch"),
            adamw=AdamWConfig(lr=1e-2),
            device=device,
        )
        self.start = {name: tensor.clone() for name, tensor in self.trainer.named_parameters()}

    async def run(self) -> None:
        share = {} if self.device == "cpu" else {"gpu_memory_utilization": 0.2}
        began = time.monotonic()
        self.engine = await ResidentEngine.start(self.model_dir, dtype="float32", vocab_size=VOCAB, **share)
        result = {"engine_start_seconds": time.monotonic() - began}
        for check in (
            self.fresh, self.every_parameter, self.back_to_the_start, self.prefix_cache, self.buckets, self.memory,
            self.server, self.worker_error, self.oversized,
        ):  # fmt: skip
            began = time.monotonic()
            result[check.__name__] = await check()
            print(f"{check.__name__}: {time.monotonic() - began:.1f} s", flush=True)
            (self.folder / "result.json").write_text(json.dumps(result, indent=1))

    # ---- the checks, in the order in which they run ----

    async def fresh(self) -> dict:
        """The engine as it started, before any sync."""
        self.fresh_answer = await self.answer()
        return {"tokens": self.fresh_answer.tokens, "error": self.error(self.fresh_answer)}

    async def every_parameter(self) -> dict:
        """Change one parameter at a time in the trainer.

        moved: how far the engine's prompt log-probs went. error: how far they are from those of the plain model with
        the same change.
        """
        measured = {}
        generator = torch.Generator().manual_seed(4)
        for name, _ in self.plain.named_parameters():
            noise = torch.randn(self.start[name].shape, generator=generator)
            self.load(self.start | {name: self.start[name] + 0.1 * noise})
            await self.sync()
            answer = await self.answer(tokens=1)
            measured[name] = {"moved": distance(answer, self.fresh_answer), "error": self.error(answer)}
        return measured

    async def back_to_the_start(self) -> dict:
        """An engine that has seen other weights against the same engine when it was fresh."""
        before = await self.answer()
        self.load(self.start)
        await self.sync()
        after = await self.answer()
        return {
            "tokens_before": before.tokens,
            "tokens": after.tokens,
            "moved": distance(before, self.fresh_answer),
            "error": distance(after, self.fresh_answer),
        }

    async def prefix_cache(self) -> dict:
        """Change the weights by a training step while the prompt is in the cache.

        `error` is that of the first answer afterwards.
        """
        await self.answer(prompt_log_probs=False)
        cached = await self.answer(prompt_log_probs=False)
        before = cached.log_probs
        packs = tiny.packs([torch.tensor(PROMPT)], max_tokens=self.trainer.pack_tokens)
        self.trainer.forward_backward(packs, NegativeLogLikelihood(packs), final=True)
        self.trainer.optim_step()
        await self.sync()
        answer = await self.answer(prompt_log_probs=False)
        return {
            "cached_before": cached.cached_tokens,
            "cached_after": answer.cached_tokens,
            "moved": max(abs(a - b) for a, b in zip(answer.log_probs, before, strict=True)),
            "error": self.error(answer),
        }

    async def buckets(self) -> dict:
        """Send new weights by each size of bucket.

        The smallest takes several, and on CUDA it is smaller than the embedding.
        """
        measured = {}
        generator = torch.Generator().manual_seed(5)
        for megabytes in BUCKETS[self.device]:
            self.load({n: t + 0.05 * torch.randn(t.shape, generator=generator) for n, t in self.start.items()})
            await self.sync(bucket_megabytes=megabytes)
            answer = await self.answer()
            measured[str(megabytes)] = {"moved": distance(answer, self.fresh_answer), "error": self.error(answer)}
        return measured

    async def memory(self) -> dict:
        """MiB of the trainer and of all vLLM processes after each of 20 syncs, and what is left in shared memory."""
        samples = []
        for _ in range(20):
            await self.sync(bucket_megabytes=8)  # small beside what may be left
            await self.answer(tokens=1)
            samples.append({"host": self.host_mib(), "device": self.device_mib()})
        size = sum(tensor.nbytes for tensor in self.start.values()) / 2**20
        left = [name for name in self.segments if (Path("/dev/shm") / name).exists()]
        return {"samples": samples, "model_mib": size, "segments": len(self.segments), "segments_left": left}

    async def server(self) -> dict:
        """An answer by way of VERL's server against one of the engine's own."""
        answer = await self.answer(prompt_log_probs=False)
        tokens, parameters = await self.engine.answer_of_server(PROMPT, tokens=len(answer.tokens))
        return {"tokens": tokens, "expected": answer.tokens, "detokenize": parameters.detokenize}

    async def worker_error(self) -> dict:
        """A tensor that the engine cannot load, then good ones again."""

        def spoilt() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.weights():
                yield name, tensor[:-1] if name == "model.norm.weight" else tensor

        outcome = await self.failure(self.engine.sync(spoilt(), bucket_megabytes=64))
        await self.sync()
        return outcome | {"error_afterwards": self.error(await self.answer())}

    async def oversized(self) -> dict:
        """A bucket smaller than the embedding where there is no CUDA IPC. Last: the engine's worker goes on waiting."""
        if self.device == "cuda":
            return {}
        return await self.failure(self.sync(bucket_megabytes=1))

    # ---- their parts ----

    async def failure(self, syncing: Awaitable[None]) -> dict:
        """Class and message of the error that `syncing` ends with; both empty without one."""
        try:
            await asyncio.wait_for(syncing, HANG_SECONDS)
        except Exception as error:
            return {"error": type(error).__name__, "message": str(error)}
        return {"error": "", "message": ""}

    def load(self, weights: dict[str, Tensor]) -> None:
        self.trainer.load_named_parameters(weights.items())

    def weights(self, bucket_megabytes: int = 64) -> Iterator[tuple[str, Tensor]]:
        return stream_weights(self.trainer, device=self.device, bucket_bytes=bucket_megabytes << 20)

    async def sync(self, bucket_megabytes: int = 64) -> None:
        """Trainer to engine; and, straight from the trainer, to the plain model."""
        await self.engine.sync(self.weights(bucket_megabytes), bucket_megabytes=bucket_megabytes)
        self.plain.load_state_dict(dict(self.trainer.named_parameters()), strict=False)

    async def answer(self, tokens: int = 16, prompt_log_probs: bool = True) -> Answer:
        return await self.engine.answer(PROMPT, tokens=tokens, prompt_log_probs=prompt_log_probs)

    def error(self, answer: Answer) -> float:
        """Largest difference of a log-prob from the plain model's."""
        want = plain_log_probs(self.plain, PROMPT + answer.tokens).tolist()
        got = answer.prompt_log_probs + answer.log_probs
        return max(abs(a - b) for a, b in zip(got, want[-len(got) :], strict=True))

    def host_mib(self) -> float:
        me = psutil.Process()
        return sum(p.memory_full_info().uss for p in [me, *me.children(recursive=True)]) / 2**20

    def device_mib(self) -> float:
        if self.device == "cpu":
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20


def watched_segments() -> list[str]:
    """Names of the shared memory that VERL's sender makes from now on."""
    names = []
    create = bucketed_weight_transfer.create_shared_memory

    def create_shared_memory(size, name):
        names.append(name)
        return create(size, name)

    bucketed_weight_transfer.create_shared_memory = create_shared_memory
    return names


def distance(a: Answer, b: Answer) -> float:
    """Largest difference of a log-prob of the prompt."""
    return max(abs(x - y) for x, y in zip(a.prompt_log_probs, b.prompt_log_probs, strict=True))


async def main(folder: Path, device: str, head: str) -> None:
    checks = Checks(folder, device, head == "tied")
    await checks.run()
    checks.engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
