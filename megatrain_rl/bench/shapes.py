"""Real model shapes by name, for runs with random weights. Numbers from the models' published config.json."""

from transformers import PretrainedConfig, Qwen2Config

_QWEN2_5 = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=32768)

SHAPES: dict[str, dict] = {
    "qwen2.5-1.5b": dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    ),
    "qwen2.5-7b": dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, tie_word_embeddings=False,
    ),
}  # fmt: skip


def shape_config(name: str, *, layers: int | None = None) -> PretrainedConfig:
    """Config of the shape `name`, cut to `layers` layers when given."""
    if name not in SHAPES:
        raise ValueError(f"--shape {name}: unknown; known: {', '.join(SHAPES)}")
    settings = SHAPES[name] | _QWEN2_5
    if layers is not None:
        settings["num_hidden_layers"] = layers
    return Qwen2Config(**settings)
