"""GRPO with StreamTrainer alone, no VERL: a tiny random Qwen2 learns to repeat the token it is given.

The sampler is a transformers model in the same process, which takes the trainer's weights after each step; the
reference of the KL term is the trainer's own frozen copy.

    python examples/grpo_streaming.py [--device cuda] [--steps 40]
"""

import argparse
import random
import tempfile

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from megatrain_rl.batch import PackedBatch, pack_sequences
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.objectives import ObjectiveOutput, TokenStats
from megatrain_rl.rollout.generation import BatchGenerator, Request
from megatrain_rl.rollout.sampling import SamplingParams
from megatrain_rl.rollout.weights import WeightUpdate
from megatrain_rl.trainer import StreamTrainer

VOCABULARY, PROMPTS, GROUP, ANSWER = 16, 16, 8, 4
KL_COEFFICIENT = 0.01


def build_model() -> Qwen2ForCausalLM:
    sizes = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCABULARY, tie_word_embeddings=True, initializer_range=0.1, **sizes)
    )


def sample(generator: BatchGenerator, rng: random.Random) -> list[Request]:
    """GROUP answers to each of PROMPTS one-token prompts, siblings side by side."""
    prompts = [[rng.randrange(VOCABULARY)] for _ in range(PROMPTS)]
    params = SamplingParams(max_tokens=ANSWER)
    requests = [
        Request(prompt_ids=prompt, params=params, random=random.Random(rng.random()))
        for prompt in prompts
        for _ in range(GROUP)
    ]
    for request in requests:
        generator.add(request)
    pending = len(requests)
    while pending:
        pending -= len(generator.step())
    return requests


def grpo_objective(advantages: Tensor, reference: dict[int, Tensor]):
    """Policy gradient plus KL penalty (Shao et al. 2024), averaged over the answer tokens of the whole mini-batch.

    advantages: one a sequence. reference: per pack, by its first sequence, the log-probs of the frozen weights. One
    update a batch, so the ratio to the sampling policy is 1 and only its gradient counts.
    """

    def objective(stats: TokenStats, pack: PackedBatch) -> ObjectiveOutput:
        log_probs_T = stats.log_probs_T
        lengths = pack.cu_seqlens.diff().long()
        advantage_T = advantages[list(pack.sequence_ids)].repeat_interleave(lengths).to(log_probs_T.device)
        difference_T = reference[pack.sequence_ids[0]].to(log_probs_T.device) - log_probs_T
        gain_T = (log_probs_T - log_probs_T.detach()).exp() * advantage_T
        kl_T = difference_T.exp() - difference_T - 1
        # Log-probs are 0 where nothing is predicted (the last token of a sequence): no KL there, and the gain is
        # masked.
        loss = (KL_COEFFICIENT * kl_T - gain_T * pack.predict_T.to(gain_T.device)).sum() / (len(advantages) * ANSWER)
        return ObjectiveOutput(loss=loss, metrics={"kl": float(kl_T.detach().sum()) / (len(advantages) * ANSWER)})

    return objective


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        build_model().save_pretrained(folder)
        config, adamw = StreamConfig(gpu_budget_gb=4, pack_tokens=512, reference="pinned"), AdamWConfig(lr=3e-3)
        trainer = StreamTrainer.from_pretrained(folder, config=config, adamw=adamw, device=args.device, reference=True)
        sampler = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    generator = BatchGenerator(sampler, eos_token_ids=[], max_batch=PROMPTS * GROUP, max_prefill_tokens=4096)

    rng = random.Random(0)
    for step in range(1, args.steps + 1):
        requests = sample(generator, rng)
        rewards = torch.tensor([sum(t == r.prompt_ids[0] for t in r.token_ids) / ANSWER for r in requests])
        groups = rewards.view(PROMPTS, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()

        packs = pack_sequences([torch.tensor(r.all_ids) for r in requests], max_tokens=trainer.pack_tokens)
        reference = trainer.log_probs(packs, weights="reference")
        by_pack = {p.sequence_ids[0]: stats.log_probs_T for p, stats in zip(packs, reference, strict=True)}
        output = trainer.forward_backward(packs, grpo_objective(advantages, by_pack), final=True)
        result = trainer.optim_step()

        update = WeightUpdate(sampler)
        update.add(list(trainer.named_parameters()))
        update.commit()
        kl = sum(m["kl"] for m in output.metrics)
        print(f"step {step}  reward {rewards.mean():.3f}  kl {kl:.4f}  grad norm {result.grad_norm:.2f}")
    trainer.close()


if __name__ == "__main__":
    main()
