"""verl_patches/process_group_cpu.py: defect still there, mended by the patch, nothing outside the gate."""

import inspect
import sys
import types

import pytest
import torch.distributed as dist
import verl.utils.distributed as patched
from patch_cases import OUTSIDE, asked

from verl_patches import process_group_cpu

NAMES = ("initialize_global_process_group", "initialize_global_process_group_ray")


@pytest.fixture
def backends(monkeypatch):
    """Backend strings that reach torch, which checks them as it does before it connects."""
    seen = []

    def init_process_group(backend=None, **kwargs):
        seen.append(backend)
        dist.BackendConfig(dist.Backend(backend))

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_defect_is_still_there(backends, name):
    with pytest.raises(ValueError, match=r"[Dd]uplicate"):
        inspect.unwrap(getattr(patched, name))()
    assert backends == ["cpu:gloo,cpu:gloo"]


@pytest.mark.parametrize("name", NAMES)
def test_patch_mends_it(backends, name):
    getattr(patched, name)()
    assert backends == ["cpu:gloo"]


def test_nothing_is_changed_where_there_is_a_gpu(monkeypatch):
    seen = []
    module = types.ModuleType(process_group_cpu.MODULE)
    module.get_device_name = lambda: "cuda"
    for name in NAMES:
        setattr(module, name, lambda: seen.append(dist.init_process_group))
    before = dist.init_process_group
    process_group_cpu.apply(module)
    for name in NAMES:
        getattr(module, name)()
    module.get_device_name = lambda: "cpu"
    getattr(module, NAMES[0])()
    assert seen[:2] == [before, before] and seen[2] is not before


def test_other_backends_are_left_alone(backends):
    patched.initialize_global_process_group_ray(backend="cpu:gloo,cuda:nccl")
    assert backends == ["cpu:gloo,cuda:nccl"]


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert process_group_cpu.MODULE not in asked(version)
    assert process_group_cpu.MODULE in asked("0.9.1")


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="initialize_global_process_group"):
        process_group_cpu.apply(types.ModuleType("verl.utils.distributed"))
    assert process_group_cpu.MODULE in sys.modules
