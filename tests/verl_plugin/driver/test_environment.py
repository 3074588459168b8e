"""A run on one machine listens on loopback, unless the user chose an address or a cluster; Ray's limits are longer."""

import os
from pathlib import Path

import pytest
import ray
from verl_cases import OURS, RUN, composed

from megatrain_rl.verl_plugin.driver import environment
from verl_patches import ours

NAMES = {**environment._ENVIRONMENT, **environment._LOOPBACK}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.setattr(ours, "_driver_lives_here", False)
    for name in (*NAMES, "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


def filled_in(*overrides: str) -> dict[str, str]:
    environment.fill_in(composed(*RUN, *OURS, *overrides))
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@pytest.mark.parametrize("overrides", [[], ["+ray_kwargs.ray_init.address=local"]])
def test_a_run_on_one_machine(overrides):
    assert filled_in(*overrides) == NAMES
    assert ours.driver_lives_here()


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379"])
def test_a_cluster_of_the_users_keeps_its_addresses(address):
    assert filled_in(f"+ray_kwargs.ray_init.address='{address}'") == environment._ENVIRONMENT


def test_a_cluster_that_is_named_in_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert filled_in() == environment._ENVIRONMENT


def test_an_address_of_the_users():
    assert filled_in("+ray_kwargs.ray_init._node_ip_address=10.0.0.1") == environment._ENVIRONMENT


@pytest.mark.parametrize("name", NAMES)
def test_what_is_set_by_hand_stays(monkeypatch, name):
    monkeypatch.setenv(name, "7")
    assert filled_in() == NAMES | {name: "7"}


@pytest.mark.parametrize("name", [name for name in environment._ENVIRONMENT if not name.endswith("first_driver")])
def test_ray_knows_the_variable(name):
    """Ray ignores a variable that it does not know."""
    folder = Path(ray.__file__).parent
    core = folder / "core" / "src" / "ray"
    readers = (core / "raylet" / "raylet", core / "gcs" / "gcs_server", folder / "_private" / "node.py")
    assert any(name.encode() in reader.read_bytes() for reader in readers)
