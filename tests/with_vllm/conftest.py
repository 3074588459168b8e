"""The place of vLLM: its CPU build in an environment of its own, or for `gpu` tests the one installed beside them."""

import contextlib
import importlib.metadata
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import vllm_venv


@dataclass(frozen=True, kw_only=True)
class Place:
    """An interpreter that has vLLM, and the environment variables of its processes."""

    device: str
    python: Path
    environment: dict[str, str]


def pytest_collection_finish(session):
    """Make the environment while other tests run, if one will ask for it.

    What goes wrong is told by the test that asks, which tries again.
    """
    wanted = any(
        getattr(item, "callspec", None) and item.callspec.params.get("place") == "cpu" for item in session.items
    )
    if wanted and not session.config.option.collectonly and not vllm_venv.why_no_cpu_build():
        threading.Thread(target=_make_ahead, daemon=True).start()


def _make_ahead() -> None:
    with contextlib.suppress(Exception):
        vllm_venv.make()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request) -> Place:
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "RAY_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    if request.param == "cuda":
        try:
            importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("vllm is not installed")
        # fp32 throughout: products of vLLM's Triton kernels are TF32 otherwise
        exact = {"TRITON_F32_DEFAULT": "ieee"}
        return Place(device="cuda", python=Path(sys.executable), environment=inherited | quiet | exact)
    # what is set for a vLLM beside the tests is not meant for the one in an environment of its own
    inherited = {k: v for k, v in inherited.items() if k != "PYTHONPATH" and not k.startswith("VLLM_")}
    if reason := vllm_venv.why_no_cpu_build():
        pytest.skip(reason)
    cpu = {
        "VERL_PLATFORM": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, instead of a share of the machine's memory
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all the tests
    }
    return Place(device="cpu", python=vllm_venv.make(), environment=inherited | quiet | cpu)
