"""MappedStore: frozen weights out of the checkpoint's files, through staging buffers that wait for their readers."""

import pytest
import tiny
import torch

from megatrain_rl.host.store import MappedStore
from megatrain_rl.model.decoder import EMBED_WEIGHT, decoder_spec
from megatrain_rl.model.hf_io import CheckpointReader


class Fence:
    """Counts how often somebody waited for the copy it stands for."""

    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


@pytest.fixture
def store(tmp_path):
    model = tiny.model(tiny.config(layers=3))
    reader = CheckpointReader(tiny.saved(model, tmp_path))
    return model, MappedStore(decoder_spec(reader.config()), reader, torch.float32, pin=False, buffers=2)


def test_blocks_read_as_saved(store):
    model, mapped = store
    for block in mapped.spec.blocks:
        flat = mapped.read(block)
        for name in block.layout.slots:
            assert torch.equal(block.layout.view(flat, name), model.get_parameter(block.names[name]))
        mapped.copied(block, Fence())


def test_a_buffer_is_refilled_only_after_its_copy(store):
    _, mapped = store
    fences = [Fence() for _ in range(3)]
    for block, fence in zip(mapped.spec.layers, fences, strict=True):
        mapped.read(block)
        mapped.copied(block, fence)
    assert [f.waited for f in fences] == [1, 0, 0]  # the third read took the first one's buffer


def test_rows_are_gathered_without_staging(store):
    model, mapped = store
    index = torch.tensor([5, 0, 5, 300])
    out = torch.empty(4, 64)
    mapped.rows(mapped.spec.embed, EMBED_WEIGHT, index, out)
    assert torch.equal(out, model.get_parameter("model.embed_tokens.weight")[index])
