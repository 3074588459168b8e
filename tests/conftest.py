"""Shared fixtures, marks and the order of tests.

`device` runs a test on the CPU and, marked `gpu`, its twin on CUDA. Every test marked `gpu` also gets the mark of its
part (gpu_parts.py).
"""

import functools
import sys
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

# file_tree.py, gpu_parts.py, oracle.py, tiny.py and varlen_on_cpu.py are modules of the tests
sys.path.insert(0, str(Path(__file__).parent))

from gpu_parts import gpu_parts_of

logging.disable_progress_bar()

# Tiny tensors: a second OpenMP thread only waits, and on a busy machine it spins while it does.
torch.set_num_threads(1)

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(config, items):
    for item in items:
        if "gpu" in item.keywords:
            for part in gpu_parts_of(item.path):
                item.add_marker(part)
    if hasattr(config, "workerinput"):  # of pytest-xdist: whole runs first, so that none is left alone at the end
        items.sort(key=lambda item: "e2e" not in item.keywords)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Whole runs one after the other in one worker, the other files beside them.

    Two whole runs that start at once are more than Ray's time limits bear on two cores.
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False

    @functools.cache
    def is_whole_run(file: str) -> bool:
        return "pytest.mark.e2e" in (config.rootpath / file).read_text()

    class WholeRunsTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "whole runs" if is_whole_run(file) else file

    return WholeRunsTogether(config, log)


@pytest.fixture(params=["cpu", GPU])
def device(request) -> str:
    return request.param


@pytest.fixture
def deterministic():
    """Makes CUDA kernels that can choose a fixed order of summation do so (attention's backward cannot otherwise)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
