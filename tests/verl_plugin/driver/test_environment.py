"""A run on one machine listens on loopback, unless the user chose an address or a cluster; Ray's limits are longer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import listeners
import pytest
import ray
from ray._private import services
from verl_cases import OURS, RUN, composed

from megatrain_rl.verl_plugin.driver import environment
from verl_patches import ours

RAY_INIT = "ray_kwargs.ray_init"
NAMES = {**environment._ENVIRONMENT, **environment._LOOPBACK}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Nothing is set by hand, and nothing of Ray's runs on this machine."""
    monkeypatch.setattr(ours, "_driver_lives_here", False)
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    for name in (*NAMES, "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


def filled_in(**ray_init: str | None) -> dict[str, str]:
    environment.fill_in(composed(*RUN, *OURS, *(f"+{RAY_INIT}.{key}={value}" for key, value in ray_init.items())))
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@pytest.mark.parametrize(
    "ray_init",
    [{}, {"address": "local"}, {"address": "null"}, {"_node_ip_address": "127.0.0.1"}, {"_node_ip_address": "null"}],
    ids=str,
)
def test_a_run_on_one_machine(ray_init):
    assert filled_in(**ray_init) == NAMES
    assert ours.driver_lives_here()


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "'ray://10.0.0.1:10001'"])
def test_a_cluster_of_the_users_keeps_its_addresses(address):
    assert filled_in(address=address) == environment._ENVIRONMENT


@pytest.mark.parametrize(
    "in_environment, ray_init, own",
    [
        ("10.0.0.1:6379", {}, False), ("10.0.0.1:6379", {"address": "auto"}, False),
        ("10.0.0.1:6379", {"address": "local"}, True), ("local", {}, True), ("", {}, True),
    ],
)  # fmt: skip
def test_a_cluster_that_is_named_in_the_environment(monkeypatch, in_environment, ray_init, own):
    """RAY_ADDRESS stands for an address that is not given, and for `auto`."""
    monkeypatch.setenv("RAY_ADDRESS", in_environment)
    assert filled_in(**ray_init) == (NAMES if own else environment._ENVIRONMENT)


@pytest.mark.parametrize(
    "ray_init, own", [({}, False), ({"address": "auto"}, False), ({"address": "local"}, True)], ids=str
)
def test_a_cluster_that_ray_start_has_left_running(monkeypatch, ray_init, own):
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: "10.0.0.1:6379")
    assert filled_in(**ray_init) == (NAMES if own else environment._ENVIRONMENT)


def test_an_address_of_the_users():
    assert filled_in(_node_ip_address="10.0.0.1") == environment._ENVIRONMENT


@pytest.mark.parametrize("name", NAMES)
def test_what_is_set_by_hand_stays(monkeypatch, name):
    monkeypatch.setenv(name, "7")
    assert filled_in() == NAMES | {name: "7"}


@pytest.mark.parametrize("rollout, told", [("vllm", True), ("embedded", False)])
def test_a_vllm_that_would_listen_is_told(monkeypatch, caplog, rollout, told):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    environment.fill_in(composed(*RUN, *OURS, f"actor_rollout_ref.rollout.name={rollout}"))
    assert ("VLLM_PLUGINS" in caplog.text) == told


@pytest.mark.parametrize("name", environment._ENVIRONMENT)
def test_ray_knows_the_variable(name):
    """Ray ignores a variable that it does not know."""
    folder = Path(ray.__file__).parent
    readers = ("_raylet.so", "core/src/ray/raylet/raylet", "core/src/ray/gcs/gcs_server", "_private/node.py")
    assert any(name.removeprefix("RAY_").encode() in (folder / reader).read_bytes() for reader in readers)


# What a driver does. Ray has been imported then, before its limits are set.
DRIVER = """
import json, ray
import megatrain_rl.verl_plugin.register
from omegaconf import OmegaConf
from megatrain_rl.verl_plugin.driver import environment

init = {"address": "local", "num_cpus": 1, "include_dashboard": False, "object_store_memory": 100_000_000}
environment.fill_in(OmegaConf.create({"ray_kwargs": {"ray_init": init}}))
ray.init(**init)

def seen():
    limits = ("health_check_timeout_ms", "raylet_client_num_connect_attempts", "py_gcs_connect_timeout_s")
    return {name: getattr(ray._config, name)() for name in limits} | {"address": ray.util.get_node_ip_address()}

print(json.dumps([seen(), ray.get(ray.remote(seen).remote())]))
"""


def test_a_real_ray_has_the_limits_and_listens_on_loopback():
    """RAY_ADDRESS is not asked, since the config says local."""
    with listeners.watched() as (mark, sockets):
        done = subprocess.run(
            [sys.executable, "-c", DRIVER], env=os.environ | mark | {"RAY_ADDRESS": "10.0.0.1:6379"},
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(sockets) > 5 and listeners.beyond_loopback(sockets) == []
    for found in json.loads(done.stdout.splitlines()[-1]):
        assert found.pop("address") == "127.0.0.1"
        assert {f"RAY_{name}": str(value) for name, value in found.items()}.items() <= NAMES.items()
