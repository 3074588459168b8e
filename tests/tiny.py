"""Tiny models and data for tests; everything is made here, nothing is downloaded."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from megatrain_rl.batch import pack_sequences
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.objectives import ObjectiveOutput
from megatrain_rl.trainer import StreamTrainer

VOCAB = 320
LENGTHS = (5, 17, 2, 9, 30, 1, 11, 24)
FAMILIES = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


def config(family: str = "qwen2", *, layers: int = 5, tied: bool = False, **more) -> PretrainedConfig:
    settings = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, tie_word_embeddings=tied, initializer_range=0.05,
    )  # fmt: skip
    return FAMILIES[family](**(settings | more))


def model(config: PretrainedConfig, *, seed: int = 0, dtype=torch.float32, device: str = "cpu"):
    """A plain Hugging Face model with weights that are not round: norm weights and biases are random too."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.to(dtype=dtype, device=device)


def saved(made, directory: Path) -> Path:
    made.save_pretrained(directory)
    return directory


def sequences(lengths=LENGTHS, *, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


FP32 = dict(param_dtype="float32", grad_dtype="float32")


def trainer(
    directory: Path,
    *,
    device: str = "cpu",
    adamw: AdamWConfig | None = None,
    reference=False,
    on_reserved=None,
    **knobs,
) -> StreamTrainer:
    return StreamTrainer.from_pretrained(
        directory,
        config=StreamConfig(**({"pack_tokens": 48, "cpu_threads": 1} | FP32 | knobs)),
        adamw=adamw or AdamWConfig(lr=1e-3),
        device=device,
        reference=reference,
        on_reserved=on_reserved,
    )


class WeightedLoss:
    """A loss with a different weight on every token's log-prob and entropy.

    It is normalised by a constant of the whole mini-batch.
    weights: by sequence, (L,) each; entry t weighs what token t predicts.
    """

    def __init__(self, weights: list[Tensor], *, entropy: float = 0.0):
        self._weights = weights
        self._entropy = entropy

    def __call__(self, stats, pack) -> ObjectiveOutput:
        weights_T = torch.cat([self._weights[i] for i in pack.sequence_ids]).to(stats.log_probs_T.device)
        total = -(weights_T * stats.log_probs_T).sum()
        if self._entropy:
            total = total - self._entropy * (weights_T * stats.entropy_T).sum()
        return ObjectiveOutput(loss=total / 50, metrics={"tokens": pack.num_tokens})


def token_weights(data: list[Tensor], *, seed: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(s), generator=generator) for s in data]


def packs(data: list[Tensor], *, max_tokens: int = 48, temperature=1.0, predict=None):
    return pack_sequences(data, max_tokens=max_tokens, temperature=temperature, predict=predict)
