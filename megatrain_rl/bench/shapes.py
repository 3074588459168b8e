"""Real model shapes by name, for runs with random weights. The numbers are from the models' published config.json.

`tiny` is no published model: it lets every command run in a second on a CPU.
"""

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

_QWEN2_5 = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=32768)
_QWEN3 = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=40960, head_dim=128)
_LLAMA3_1 = dict(
    rope_parameters={
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    max_position_embeddings=131072,
)  # fmt: skip

_FAMILIES: dict[str, tuple[type[PretrainedConfig], Mapping[str, Any]]] = {
    "qwen2": (Qwen2Config, _QWEN2_5),
    "qwen3": (Qwen3Config, _QWEN3),
    "llama": (LlamaConfig, _LLAMA3_1),
}


def _shape(
    family: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool
) -> tuple[str, dict[str, Any]]:
    return family, dict(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tied,
    )  # fmt: skip


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": _shape("qwen2", 64, 160, 3, 4, 2, 320, tied=True),
    "qwen2.5-0.5b": _shape("qwen2", 896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _shape("qwen2", 1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _shape("qwen2", 2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064, tied=False),
    "qwen2.5-14b": _shape("qwen2", 5120, 13824, 48, 40, 8, 152064, tied=False),
    "qwen2.5-32b": _shape("qwen2", 5120, 27648, 64, 40, 8, 152064, tied=False),
    "qwen3-8b": _shape("qwen3", 4096, 12288, 36, 32, 8, 151936, tied=False),
    "qwen3-32b": _shape("qwen3", 5120, 25600, 64, 64, 8, 151936, tied=False),
    "llama-3.1-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256, tied=False),
}


def shape_config(name: str, *, layers: int | None = None) -> PretrainedConfig:
    """The config of the shape `name`, with `layers` layers when given. ValueError for an unknown name or no layer."""
    if name not in SHAPES:
        raise ValueError(f"--shape {name}: unknown; known: {', '.join(SHAPES)}")
    if layers is not None and layers < 1:
        raise ValueError(f"--layers {layers}: must be at least 1")
    family, settings = SHAPES[name]
    config_class, common = _FAMILIES[family]
    return config_class(**{**common, **settings, **({} if layers is None else {"num_hidden_layers": layers})})
