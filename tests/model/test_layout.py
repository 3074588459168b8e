"""The map from names to places, and the blocks of the supported models."""

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.model.decoder import decoder_spec
from megatrain_rl.model.layout import ALIGNMENT, LayerLayout


def test_views_share_memory_and_do_not_overlap():
    layout = LayerLayout({"a": (3, 5), "b": (7,), "c": (2, 64)})
    flat = torch.zeros(layout.numel)
    for i, view in enumerate(layout.views(flat).values()):
        view.fill_(i + 1)
    assert [int((flat == i).sum()) for i in (1, 2, 3)] == [15, 7, 128]
    assert layout.num_parameters == 150
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.slots.values())
    assert layout.view(flat, "b").shape == (7,) and (layout.view(flat, "b") == 2).all()


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_hold_every_parameter_once(family, tied):
    config = tiny.config(family, tied=tied)
    spec = decoder_spec(config)
    expected = {n: tuple(p.shape) for n, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    found = {block.names[name]: slot.shape for block in spec.blocks for name, slot in block.layout.slots.items()}
    assert found == expected
    assert sum(len(block.names) for block in spec.blocks) == len(expected)
    assert spec.tied == tied and spec.num_layers == 5
    assert len({id(m) for m in spec.layer_modules}) == 1  # one template for equal layers
    assert all(p.is_meta for m in spec.layer_modules for p in m.parameters())


def test_real_shapes_have_their_size():
    assert decoder_spec(shape_config("qwen2.5-7b")).num_parameters == pytest.approx(7.62e9, rel=0.01)
    assert decoder_spec(shape_config("qwen2.5-1.5b")).num_parameters == pytest.approx(1.54e9, rel=0.01)
    assert decoder_spec(shape_config("qwen2.5-7b", layers=4)).num_layers == 4
    with pytest.raises(ValueError, match="--shape qwen9: "):
        shape_config("qwen9")
