"""Where memory lies on a machine with several NUMA nodes, and dealing it out to all; fake trees and this machine."""

import mmap
import re
from pathlib import Path

import pytest
import tiny
import torch
from file_tree import tree

from megatrain_rl.config import StreamConfig
from megatrain_rl.host import numa, pinned

NODES = "sys/devices/system/node"


@pytest.fixture(autouse=True)
def default_again():
    yield
    pinned.place_memory("default")


def policy(address: int) -> str:
    """The second word of the line in numa_maps of the mapping that holds this address."""
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    return max((int(words[0], 16), words[1]) for words in lines if int(words[0], 16) <= address)[1]


def test_interleave_on_this_machine():
    """Every kernel that knows of nodes takes it, also for one node; the others are one error that names the setting."""
    if not numa.socket_nodes():
        with pytest.raises(ValueError, match="host_numa"):
            pinned.place_memory("interleave")
        return
    before = pinned.HostRegion(1 << 22, torch.uint8, pin=False)
    pinned.place_memory("interleave")
    region = pinned.HostRegion(1 << 22, torch.uint8, pin=False)
    assert policy(region.flat.data_ptr()).startswith("interleave")
    assert not policy(before.flat.data_ptr()).startswith("interleave")
    start = region.flat.data_ptr()
    placed = numa.placement([(start - mmap.PAGESIZE, start + region.flat.nbytes)])
    assert set(placed) <= set(numa.socket_nodes()) and sum(placed.values()) >= region.flat.nbytes


def test_a_refusal_names_the_setting_before_anything_is_allocated(tmp_path, monkeypatch):
    monkeypatch.setattr(numa, "_MBIND", {})
    made = tiny.saved(tiny.model(tiny.config(layers=2)), tmp_path)
    with pytest.raises(ValueError, match="host_numa=default"):
        tiny.trainer(made, host_numa="interleave")


def test_a_container_that_may_not_is_told_what_to_add(monkeypatch):
    if not numa.socket_nodes():
        pytest.skip("a kernel without NUMA: refused before the system call")
    monkeypatch.setattr(numa, "_MBIND", dict.fromkeys(numa._MBIND, 10**6))  # no such system call
    with pytest.raises(ValueError, match=r"host_numa.*SYS_NICE"):
        pinned.place_memory("interleave")


def test_gpu_memory_and_forbidden_nodes_are_left_out(tmp_path):
    root = tree(
        tmp_path,
        {
            f"{NODES}/has_memory": "0-2,5,9-16",
            f"{NODES}/has_cpu": "0-5",
            "proc/self/status": "Mems_allowed_list:\t1-16",
        },
    )
    assert numa.allowed_nodes(root) == [1, 2, 5, *range(9, 17)]
    assert numa.socket_nodes(root) == [1, 2, 5]
    assert numa.allowed_nodes(tmp_path / "without") == []


def test_placement_counts_what_begins_in_a_region(tmp_path):
    root = tree(tmp_path, {"proc/self/numa_maps": "\n".join([
        "00001000 default file=/bin/x mapped=2 N0=2 kernelpagesize_kB=4",
        "00005000 interleave:0-1 anon=30 dirty=30 N0=20 N1=10 kernelpagesize_kB=4",
        "00009000 default anon=1 N1=1 kernelpagesize_kB=2048",
        "0000a000 default anon=9 N0=9 kernelpagesize_kB=4",
    ])})  # fmt: skip
    assert numa.placement([(0x4000, 0x6000), (0x9000, 0xA000)], root) == {0: 80 * 1024, 1: 40 * 1024 + 2048 * 1024}


def test_it_is_told_where_there_are_several_nodes(monkeypatch, tmp_path, caplog):
    assert pinned.where_memory_lies() is None or len(numa.allowed_nodes()) > 1
    monkeypatch.setattr(numa, "allowed_nodes", lambda: [0, 1])
    caplog.set_level("INFO")
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config(layers=2)), tmp_path))
    [line] = [line for line in caplog.messages if "NUMA" in line]
    assert re.search(r"node 0 [\d.]+ GB, node 1 [\d.]+ GB \(host_numa=default", line)
    trainer.close()


def test_it_is_a_knob():
    assert StreamConfig().host_numa == "default"
    with pytest.raises(ValueError, match="host_numa"):
        StreamConfig(host_numa="spread")
