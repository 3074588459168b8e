"""The supported Hugging Face architectures, and where each keeps its parts.

A new model family is a new entry here, not new code elsewhere. It is listed only when its numerics are proven against
`tests/oracle.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Family:
    """Attribute paths inside the `AutoModelForCausalLM` of this family."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    rotary: str = "model.rotary_emb"
    head: str = "lm_head"


# Dense decoders: RMSNorm, rotary positions, one `hidden -> hidden` call per layer, no scaling of embeddings or logits.
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
}


def family_of(model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type={model_type!r} is not supported by the streaming trainer; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
