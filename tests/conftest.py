"""Shared fixtures. `device` runs a test on the CPU and, marked `gpu`, its twin on CUDA."""

import sys
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

logging.disable_progress_bar()
# oracle.py, tiny.py and varlen_on_cpu.py are modules of the tests
sys.path.insert(0, str(Path(__file__).parent))

# Tiny tensors: a second OpenMP thread only waits, and on a busy machine it spins while it does.
torch.set_num_threads(1)

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    if hasattr(
        config, "workerinput"
    ):  # pytest-xdist: whole runs first and one after the other, beside files of other tests
        items.sort(key=lambda item: "e2e" not in item.keywords)
        for item in items:
            item.add_marker(pytest.mark.xdist_group("e2e" if "e2e" in item.keywords else item.path.name))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(params=["cpu", GPU])
def device(request) -> str:
    return request.param


@pytest.fixture
def deterministic():
    """CUDA kernels that can choose a fixed order of summation do (attention's backward cannot otherwise)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
