"""DecoderSpec: what is streamed. A Hugging Face causal language model as blocks with flat layouts.

The model is built once on the meta device (no memory); its own layer classes do the arithmetic, so a layer here
computes what transformers computes. Blocks, in forward order: `embed`, `layers.0` ..., `head` (final norm, and the
output matrix unless tied).
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatrain_rl.model.attention import ATTENTION_NAME, register_attention
from megatrain_rl.model.families import family_of
from megatrain_rl.model.layout import LayerLayout

EMBED_WEIGHT = "embed_tokens.weight"
HEAD_WEIGHT = "lm_head.weight"
# Before the names of the final norm's parameters, which share the head block with the output matrix.
NORM_PREFIX = "norm."
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One unit of storage and transfer.

    names: Hugging Face name of each parameter, by its name in `layout`.
    """

    name: str
    layout: LayerLayout
    names: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Blocks and meta modules of one model.

    layer_modules: the module that runs each layer; layers of the same structure share one (one compiled graph, one set
    of views to bind).
    """

    config: PretrainedConfig
    embed: Block
    layers: tuple[Block, ...]
    head: Block
    layer_modules: tuple[nn.Module, ...]
    norm_module: nn.Module
    rotary_class: type[nn.Module]
    tied: bool
    padding_idx: int | None  # a token whose embedding row gets no gradient from the input side, as in transformers

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.embed, *self.layers, self.head)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.embed.layout.slots[EMBED_WEIGHT].shape[1]

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        named = self.config.to_dict().get("head_dim")
        return named or self.hidden_size // self.config.num_attention_heads

    @property
    def key_value_width(self) -> int:
        """Numbers that a token's keys and values have in a layer."""
        return 2 * self.config.num_key_value_heads * self.head_dim

    @property
    def vocab_size(self) -> int:
        return self.embed.layout.slots[EMBED_WEIGHT].shape[0]

    @property
    def num_parameters(self) -> int:
        return sum(b.layout.num_parameters for b in self.blocks)

    @property
    def max_layer_numel(self) -> int:
        return max(b.layout.numel for b in self.layers)

    @property
    def output_weight(self) -> tuple[Block, str]:
        """Block and local name of the output matrix (V, H): the embedding when tied."""
        return (self.embed, EMBED_WEIGHT) if self.tied else (self.head, HEAD_WEIGHT)


def norm_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The final norm's among the head block's `weights` (or gradients), by its module's own names."""
    return {n.removeprefix(NORM_PREFIX): w for n, w in weights.items() if n.startswith(NORM_PREFIX)}


def decoder_spec(config: PretrainedConfig) -> DecoderSpec:
    """Describe the model of `config`.

    Unsupported architectures, training-time dropout and parameters that the model's class freezes are a ValueError.
    """
    family = family_of(config.model_type)
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop"):
        if config.to_dict().get(name):
            raise ValueError(
                f"{name}={config.to_dict()[name]}: dropout is not supported; set {name}=0 in the model's config"
            )
    _check_rope(config)
    register_attention()
    config = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except Exception as error:  # sizes that fit no model end in errors of many kinds
        raise ValueError(f"the model's config (config.json) describes no model that can be made: {error}") from error
    _check_trainable(model)
    model.train()
    model.config._attn_implementation = ATTENTION_NAME
    model.config.architectures = [type(model).__name__]  # serving engines look a saved checkpoint up by it
    tied = bool(model.config.tie_word_embeddings)
    layers = model.get_submodule(family.layers)
    embed = model.get_submodule(family.embed)
    norm = model.get_submodule(family.norm)
    rotary_class = type(model.get_submodule(family.rotary))
    layer_blocks = tuple(_module_block(f"layers.{i}", layer, f"{family.layers}.{i}.") for i, layer in enumerate(layers))
    head_shapes = {NORM_PREFIX + n: p.shape for n, p in norm.named_parameters()}
    head_names = {NORM_PREFIX + n: f"{family.norm}.{n}" for n, _ in norm.named_parameters()}
    if not tied:
        head_shapes[HEAD_WEIGHT] = model.get_submodule(family.head).weight.shape
        head_names[HEAD_WEIGHT] = f"{family.head}.weight"
    return DecoderSpec(
        config=model.config,
        embed=Block(
            name="embed",
            layout=LayerLayout({EMBED_WEIGHT: embed.weight.shape}),
            names={EMBED_WEIGHT: f"{family.embed}.weight"},
        ),
        layers=layer_blocks,
        head=Block(name="head", layout=LayerLayout(head_shapes), names=head_names),
        layer_modules=_shared_modules(list(layers), layer_blocks, model.config),
        norm_module=norm,
        rotary_class=rotary_class,
        tied=tied,
        padding_idx=embed.padding_idx,
    )


def _check_trainable(model: nn.Module) -> None:
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise ValueError(
            f"{type(model).__name__} freezes {frozen[0]} and {len(frozen) - 1} other parameters (requires_grad=False): "
            "not supported, every parameter is trained"
        )


def _check_rope(config: PretrainedConfig) -> None:
    """Refuse position encodings that depend on more than the position, with a ValueError.

    Some kinds rescale by the longest sequence they are run with, which in a pack would be a neighbour's.
    """
    rope_type = (config.to_dict().get("rope_parameters") or {}).get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise ValueError(f"rope_type={rope_type!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")


def _module_block(name: str, module: nn.Module, prefix: str) -> Block:
    shapes = {n: p.shape for n, p in module.named_parameters()}
    return Block(name=name, layout=LayerLayout(shapes), names={n: prefix + n for n in shapes})


def _shared_modules(
    layers: list[nn.Module], blocks: tuple[Block, ...], config: PretrainedConfig
) -> tuple[nn.Module, ...]:
    """For each layer, the first layer of its structural group, which stands for the group.

    Layers that hold equal parameters but compute differently (a sliding window here, full attention there) are
    different groups: `layer_types` tells.
    """
    layer_types = config.to_dict().get("layer_types") or ["full_attention"] * len(layers)
    representative: dict[tuple, nn.Module] = {}
    return tuple(
        representative.setdefault((blocks[i].layout.signature, layer_types[i]), layer) for i, layer in enumerate(layers)
    )
