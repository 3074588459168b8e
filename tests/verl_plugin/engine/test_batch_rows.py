"""engine/batch.py: rows of VERL's batches are picked as VERL picks them."""

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl_cases import rl_rows, sft_batch, v0_batch, v1_batch

from megatrain_rl.verl_plugin.engine import batch


@pytest.mark.parametrize("rows", [(0,), (6, 2, 3), (1, 1), tuple(range(7))])
@pytest.mark.parametrize("layout", [v1_batch, v0_batch, sft_batch])
def test_rows_are_those_that_verl_selects(layout, rows):
    """Jagged and padded fields, one value for all rows and one for each, of every dtype."""
    data = layout(rl_rows(rows=7, seed=2), temperature=0.7)
    data["several"] = torch.arange(42.0).view(7, 2, 3)
    data["deep"] = torch.nested.as_nested_tensor([torch.randn(n, 4) for n in range(1, 8)], layout=torch.jagged)
    tu.assign_non_tensor(data, uid=[f"row {i}" for i in range(7)], note={"a": 1})
    want, got = tu.index_select_tensor_dict(data, list(rows)), batch.select_rows(data, rows)
    assert set(got.keys()) == set(want.keys()) and got.batch_size == want.batch_size
    jagged = 0
    for key in want.keys():  # noqa: SIM118
        mine, theirs = got.get(key), want.get(key)
        if isinstance(theirs, torch.Tensor) and theirs.is_nested:
            jagged += 1
            assert mine.dtype == theirs.dtype and mine.size(0) == theirs.size(0)
            for a, b in zip(mine.unbind(), theirs.unbind(), strict=True):
                assert torch.equal(a, b), key
        elif isinstance(theirs, torch.Tensor):
            assert torch.equal(mine, theirs), key
        else:
            mine, theirs = tu.get(got, key), tu.get(want, key)
            assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs, key
    assert jagged >= 3


def test_the_batch_is_left_as_it_was():
    data = v1_batch(rl_rows(rows=4))
    keys = set(data.keys())
    batch.select_rows(data, (1, 2))["more"] = torch.zeros(2)
    assert set(data.keys()) == keys and data.batch_size == (4,)
