"""The stores by which torch's processes find each other are files in a run on one machine, not open servers.

Symptom: the trainer's process and vLLM's engine each listen on every interface.
Cause: torch's TCPStore, which `tcp://` and `env://` stand for, binds to every interface, whatever address it is given.
Upstream: torch 2.13, torch.distributed.TCPStore. verl 0.9.1, utils/distributed.py:98, and vllm 0.24 to 0.27,
    v1/executor/uniproc_executor.py and multiproc_executor.py, ask for one. No issue known.
Remove when: TCPStore binds to the address that it is given.

The driver sets VARIABLE for runs of ours on one machine (megatrain_rl/verl_plugin/driver/environment.py), and the run's
processes inherit it. vLLM's processes load `install_in_vllm` by an entry point, since they may need it before anything
imports VERL.
"""

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import ModuleType

from verl_patches.post_import import on_import
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

VERSIONS = {"verl": TESTED_VERL}
VARIABLE = "MEGATRAIN_RL_LOOPBACK"
# The name of the entry point in pyproject.toml.
PLUGIN = "megatrain_loopback"
# VERL's own setting for another kind of store.
_VERLS = "DIST_INIT_METHOD"
_IN_VLLM = ("vllm.v1.executor.uniproc_executor", "vllm.v1.executor.multiproc_executor")


def wanted() -> bool:
    return os.environ.get(VARIABLE) == "1"


def apply_to_worker(module: ModuleType) -> None:
    def initialize(function, *args, **kwargs):
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        if not (wanted() and alone) or os.environ.get(_VERLS):
            return function(*args, **kwargs)
        with _environment(_VERLS, file_url()):
            return function(*args, **kwargs)

    wrap(module, "initialize_global_process_group_ray", initialize, patch=__name__)


def apply_to_executor(module: ModuleType) -> None:
    def init_method(function, *args, **kwargs):
        return file_url() if wanted() else function(*args, **kwargs)

    wrap(module, "get_distributed_init_method", init_method, patch=__name__)


def install_in_vllm() -> None:
    """vLLM's entry point `vllm.general_plugins`, called in each of its processes. Other runs are left alone."""
    if wanted():
        for name in _IN_VLLM:
            on_import(name, apply_to_executor)


def reaches_vllm() -> bool:
    """Whether vLLM will call `install_in_vllm`: an installation that is older has no entry point for it."""
    chosen = os.environ.get("VLLM_PLUGINS")
    there = entry_points(group="vllm.general_plugins", name=PLUGIN)
    return bool(there) and (chosen is None or PLUGIN in chosen.split(","))


def file_url() -> str:
    """A file of this process for one store, in a folder of its own that only this user can read."""
    folder = tempfile.mkdtemp(prefix="megatrain_rl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return f"file://{folder}/store"  # torch takes the path as it stands: a space is no %20 to it


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


HOOKS = {"verl.utils.distributed": apply_to_worker}
