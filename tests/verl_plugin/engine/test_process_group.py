"""The one training process talks to itself without NCCL, whose communicator would take GPU memory beside the budget."""

import pytest
import torch
import torch.distributed as dist
import verl_cases

from megatrain_rl.verl_plugin.engine import process_group


@pytest.fixture
def opened_by_verl(world, monkeypatch):
    """The default group, with a backend config like that of VERL's group on a GPU: this build may have no NCCL."""
    config = dist.get_backend_config
    original = dist.group.WORLD
    monkeypatch.setattr(
        dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl" if dist.group.WORLD is original else config()
    )
    return original


def test_a_group_with_nccl_is_replaced(opened_by_verl):
    process_group.without_nccl()
    replaced = dist.group.WORLD
    assert replaced is not opened_by_verl and "nccl" not in dist.get_backend_config()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    loss = torch.tensor(3.0)
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    gathered = [None]
    dist.all_gather_object(gathered, {"loss": 1})
    dist.barrier()
    assert loss == 3.0 and gathered == [{"loss": 1}]
    process_group.without_nccl()
    assert dist.group.WORLD is replaced, "once"


def test_several_processes_keep_their_group(opened_by_verl, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    process_group.without_nccl()
    assert dist.group.WORLD is opened_by_verl


def test_a_group_without_nccl_stays(world):
    before = dist.group.WORLD
    process_group.without_nccl()
    assert dist.group.WORLD is before


def test_the_engine_replaces_it(opened_by_verl, tiny_model):
    engine = verl_cases.make_engine(tiny_model)
    assert engine.get_data_parallel_group() is dist.group.WORLD is not opened_by_verl
