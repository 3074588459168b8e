"""Shapes give the parameter counts their publishers name."""

import pytest

from megatrain_rl.bench.shapes import SHAPES, shape_config
from megatrain_rl.model.decoder import decoder_spec

PUBLISHED_BILLIONS = {
    "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76, "qwen3-8b": 8.19, "qwen3-32b": 32.76, "llama-3.1-8b": 8.03,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "tiny"])
def test_parameters_are_as_published(name):
    assert round(decoder_spec(shape_config(name)).num_parameters / 1e9, 2) == PUBLISHED_BILLIONS[name]


def test_fewer_layers_change_nothing_else():
    whole, cut = shape_config("llama-3.1-8b"), shape_config("llama-3.1-8b", layers=2)
    assert cut.num_hidden_layers == 2 and whole.num_hidden_layers == 32
    assert cut.hidden_size == whole.hidden_size and cut.rope_parameters == whole.rope_parameters
    assert whole.rope_parameters["rope_type"] == "llama3"
