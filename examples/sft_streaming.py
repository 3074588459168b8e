"""Supervised fine-tuning with StreamTrainer alone: a tiny random Qwen2 learns to count.

python examples/sft_streaming.py [--device cuda] [--steps 30]
"""

import argparse
import random

import torch
from transformers import Qwen2Config

from megatrain_rl.batch import pack_sequences
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.objectives import NegativeLogLikelihood
from megatrain_rl.optim.lr_schedule import LRSchedule
from megatrain_rl.trainer import StreamTrainer

VOCABULARY = 64
MODEL = Qwen2Config(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    initializer_range=0.1,
)


def counting_sequences(count: int, rng: random.Random) -> list[torch.Tensor]:
    """Arithmetic progressions modulo the vocabulary, of different lengths: packing needs no padding."""
    sequences = []
    for _ in range(count):
        start, stride, length = rng.randrange(VOCABULARY), rng.randint(1, 3), rng.randint(8, 32)
        sequences.append((start + stride * torch.arange(length)) % VOCABULARY)
    return sequences


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    adamw = AdamWConfig(lr=5e-3)
    trainer = StreamTrainer.from_config(
        MODEL,
        config=StreamConfig(gpu_budget_gb=4, pack_tokens=512),
        adamw=adamw,
        schedule=LRSchedule(kind="cosine", warmup_steps=3, total_steps=args.steps),
        device=args.device,
    )
    rng = random.Random(0)
    for step in range(1, args.steps + 1):
        packs = pack_sequences(counting_sequences(64, rng), max_tokens=trainer.pack_tokens)
        output = trainer.forward_backward(packs, NegativeLogLikelihood(packs), final=True)
        result = trainer.optim_step()
        trainer.schedule.step()
        print(f"step {step}  loss {sum(output.losses):.3f}  grad norm {result.grad_norm:.2f}  lr {result.lr:.1e}")
    trainer.close()


if __name__ == "__main__":
    main()
