"""A model's folder is what transformers would load from it, or it is refused before any of it is read.

The configuration says which tensors a model has and the files hold tensors by name. Where the two disagree,
transformers may draw a missing tensor at random, leave out one that it does not know, or load two matrices where the
configuration says one. A trainer that went on from there would train another model than the one that was meant. Called
by trainer.py and checkpoint/training_state.py.
"""

import logging
import re

import torch
from torch import Tensor

from megatrain_rl.model.decoder import EMBED_WEIGHT, Block, DecoderSpec
from megatrain_rl.model.families import family_of
from megatrain_rl.model.hf_io import CheckpointReader

log = logging.getLogger(__name__)

_FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names
# What files of quantized weights have beside the weights: scales, zero points, packed integers.
_QUANTIZED = re.compile(
    r"(scale|scales|scale_inv|zero_point|qweight|qzeros|g_idx|absmax|quant_map|packed|blocks)$|\.quant_state\."
)
# transformers leaves these out without a word: they follow from the configuration.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
# Beyond it a number rounds to an infinite one.
_LARGEST = torch.finfo(torch.bfloat16).max
_DEQUANTIZE = "training needs every weight in bf16 or fp32: use the model before its quantization, or dequantize it"


def check_folder(spec: DecoderSpec, reader: CheckpointReader) -> None:
    """Check that the files hold the model that the configuration describes; a ValueError names what disagrees."""
    _check_not_quantized(spec, reader)
    for block in spec.blocks:
        for name, slot in block.layout.slots.items():
            full_name = block.names[name]
            dtype, shape = reader.header(full_name)
            if shape != tuple(slot.shape):
                raise _wrong_shape(full_name, shape, slot.shape)
            if dtype not in _FLOATS:
                raise ValueError(f"{reader.place(full_name)} has dtype {dtype}: {_DEQUANTIZE}")
    _check_tied(spec, reader)
    _check_others(spec, reader)


def check_shape(block: Block, name: str, shape: tuple[int, ...]) -> None:
    expected = block.layout.slots[name].shape
    if shape != tuple(expected):
        raise _wrong_shape(block.names[name], shape, expected)


def _wrong_shape(full_name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> ValueError:
    return ValueError(f"tensor {full_name!r} has shape {shape}, config.json implies {tuple(expected)}")


def check_finite(tensor: Tensor, what: str) -> None:
    """A ValueError that begins with `what` if a number is NaN, infinite, or would be in bf16. One pass over the memory,
    without a copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    low, high = torch.aminmax(tensor)
    if not (low >= -_LARGEST and high <= _LARGEST):  # a NaN anywhere makes both ends NaN
        raise ValueError(
            f"{what} has values that are NaN, infinite or beyond {_LARGEST:.3g}: the file is damaged, or its training "
            "diverged"
        )


def _check_not_quantized(spec: DecoderSpec, reader: CheckpointReader) -> None:
    for config, place in (
        (reader.raw_config, reader.directory / "config.json"), (spec.config.to_dict(), "the model's config (hf_config)"),
    ):  # fmt: skip
        for key in ("quantization_config", "compression_config"):
            given = config.get(key)
            if given:
                method = given.get("quant_method", "?") if isinstance(given, dict) else given
                raise ValueError(f"{place} has {key} ({method}): {_DEQUANTIZE}")


def _check_tied(spec: DecoderSpec, reader: CheckpointReader) -> None:
    head = f"{family_of(spec.config.model_type).head}.weight"
    if not spec.tied or head not in reader.names:
        return
    embedding = spec.embed.names[EMBED_WEIGHT]
    if not torch.equal(reader.tensor(embedding), reader.tensor(head)):
        raise ValueError(
            f"{reader.directory}: config.json has tie_word_embeddings=true, but {head} and {embedding} differ, and "
            "transformers would not tie them: set tie_word_embeddings=false in config.json, or take the matrix that is not "
            "meant out of the files"
        )


def _check_others(spec: DecoderSpec, reader: CheckpointReader) -> None:
    used = {name for block in spec.blocks for name in block.names.values()}
    used.add(f"{family_of(spec.config.model_type).head}.weight")  # a second copy of a tied matrix
    others = sorted(name for name in reader.names if name not in used and not _DERIVED.search(name))
    for name in others:
        if _QUANTIZED.search(name):
            raise ValueError(f"{reader.place(name)} belongs to quantized weights: {_DEQUANTIZE}")
    parts = tuple(part + "." for part in _parts(spec))
    for name in others:
        if name.startswith(parts):
            raise ValueError(
                f"{reader.place(name)} belongs to a part of the model for which config.json asks for no such tensor, so it "
                "would be left out and another model trained: mend config.json, or take the tensor out of the file"
            )
    if others:
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        log.warning(
            "%s: the model of config.json has no place for %s; left out, as by transformers", reader.directory, shown
        )


def _parts(spec: DecoderSpec) -> set[str]:
    """The layers, and the modules beside them, by the names that their tensors begin with."""
    layers = {f"{family_of(spec.config.model_type).layers}.{i}" for i in range(len(spec.layers))}
    outside = (spec.embed, spec.head)
    return layers | {name.rpartition(".")[0] for block in outside for name in block.names.values()}
