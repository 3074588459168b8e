"""A tiny random Qwen2 in fp32, wide-spread weights so that its choices are far from ties."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 96
EOS = 5


def build_model(seed: int = 0, tied: bool = False) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return build_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(6, VOCABULARY, (n,), generator=generator).tolist() for n in (1, 7, 3, 12, 5, 9)]
