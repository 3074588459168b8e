"""verl_patches/loopback_stores.py: no store of torch's listens in a run on one machine; with_vllm has the real vLLM."""

import importlib.util
import inspect
import os
import socket
import subprocess
import sys
import types
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import verl.utils.distributed as verls
from patch_cases import OUTSIDE, asked, empty

from verl_patches import loopback_stores
from verl_patches.loopback_stores import VARIABLE

WORKER = "verl.utils.distributed"
# What VERL's worker does, in a process of its own; prints the addresses on which it then listens.
OPEN_GROUP = """
import os, psutil, torch.distributed
import verl, verl.utils.distributed as verls
verls.initialize_global_process_group_ray(timeout_second=60)
torch.distributed.barrier()
own = psutil.Process().net_connections("tcp")
print(sorted({c.laddr.ip for c in own if c.status == "LISTEN"}), os.environ.get("DIST_INIT_METHOD"))
"""


def free_port() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


def addresses(**environment: str) -> str:
    network = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    inherited = {key: value for key, value in os.environ.items() if key not in (VARIABLE, "DIST_INIT_METHOD")}
    done = subprocess.run(
        [sys.executable, "-c", OPEN_GROUP], env=inherited | network | {"VERL_PLATFORM": "cpu"} | environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_defect_is_still_there():
    assert "'::'" in addresses() or "'0.0.0.0'" in addresses()
    source = inspect.getsource(inspect.unwrap(verls.initialize_global_process_group_ray))
    assert 'init_method=os.environ.get("DIST_INIT_METHOD", None)' in source


def test_patch_mends_it():
    """Only gloo listens, on loopback, and the variable is as it was afterwards."""
    assert addresses(**{VARIABLE: "1"}) == "['127.0.0.1'] None"


@pytest.fixture
def worker(monkeypatch):
    """worker(): the store that VERL's function would ask for."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.delenv("DIST_INIT_METHOD", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    module = types.ModuleType(WORKER)
    module.initialize_global_process_group_ray = lambda: os.environ.get("DIST_INIT_METHOD")
    loopback_stores.apply_to_worker(module)
    return module.initialize_global_process_group_ray


def test_each_group_has_a_file_of_its_own(worker):
    first, second = worker(), worker()
    assert first != second and first.startswith("file:///")
    folder = Path(first.removeprefix("file://")).parent
    assert folder.stat().st_mode & 0o077 == 0, "nobody else may read it"


def test_a_folder_with_a_space(tmp_path, monkeypatch):
    """torch does not decode a path."""
    from torch.distributed.rendezvous import rendezvous

    (tmp_path / "a folder").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a folder"))
    store, _, _ = next(rendezvous(loopback_stores.file_url(), rank=0, world_size=1))
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_what_stays(worker, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert worker() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("DIST_INIT_METHOD", "tcp://127.0.0.1:1")
    assert worker() == "tcp://127.0.0.1:1"
    monkeypatch.delenv("DIST_INIT_METHOD")
    monkeypatch.delenv(VARIABLE)
    assert worker() is None


def executor() -> types.ModuleType:
    module = types.ModuleType(loopback_stores._IN_VLLM[0])
    module.get_distributed_init_method = lambda ip, port: f"tcp://{ip}:{port}"
    loopback_stores.apply_to_executor(module)
    return module


def test_vllms_store(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert executor().get_distributed_init_method("127.0.0.1", 3) == "tcp://127.0.0.1:3"
    monkeypatch.setenv(VARIABLE, "1")
    assert executor().get_distributed_init_method("127.0.0.1", 3).startswith("file:///")


def test_vllm_finds_its_entry_point(monkeypatch):
    """It is called in every process of vLLM, also where no run of ours is: there it waits for nothing."""
    [point] = entry_points(group="vllm.general_plugins", name="megatrain_loopback")
    assert point.load() is loopback_stores.install_in_vllm
    asked_for = []
    monkeypatch.setattr(loopback_stores, "on_import", lambda name, hook: asked_for.append(name))
    monkeypatch.delenv(VARIABLE, raising=False)
    point.load()()
    assert asked_for == []
    monkeypatch.setenv(VARIABLE, "1")
    point.load()()
    assert asked_for == list(loopback_stores._IN_VLLM)


@pytest.mark.parametrize(
    "chosen, reaches", [(None, True), ("other,megatrain_loopback", True), ("other", False), ("", False)]
)
def test_vllm_may_be_told_to_leave_it_out(monkeypatch, chosen, reaches):
    monkeypatch.setenv("VLLM_PLUGINS", chosen or "")
    if chosen is None:
        monkeypatch.delenv("VLLM_PLUGINS")
    assert loopback_stores.reaches_vllm() == reaches


def test_an_older_installation_has_no_entry_point(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(loopback_stores, "entry_points", lambda **selection: ())
    assert not loopback_stores.reaches_vllm()


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="initialize_global_process_group_ray"):
        loopback_stores.apply_to_worker(empty(WORKER))
    with pytest.raises(AttributeError, match="get_distributed_init_method"):
        loopback_stores.apply_to_executor(empty(loopback_stores._IN_VLLM[0]))


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert WORKER not in asked(version) and WORKER in asked("0.9.1")
    assert importlib.util.find_spec("verl")
