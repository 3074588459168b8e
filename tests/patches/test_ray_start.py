"""verl_patches/ray_start.py: in runs of ours, Ray's switch is set in time and a node that starts too slowly is told."""

import inspect
import types

import pytest
import ray
from patch_cases import OUTSIDE, asked, empty
from ray._private import node, ray_constants

from verl_patches import ours, ray_start

TOO_LATE = "The current node timed out during startup. This could happen because"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(ours, "_driver_lives_here", True)
    monkeypatch.setenv(ray_start.SWITCH, "0")


def start(*, patched: bool = True, error: Exception | None = None) -> bool:
    """Whether Ray may form a cluster of several nodes when it starts."""
    seen = []

    def init(address=None):
        seen.append(ray_constants.ENABLE_RAY_CLUSTER)
        if error is not None:
            raise error

    module = types.SimpleNamespace(init=init)
    if patched:
        ray_start.apply(module)
        ray_start.apply(module)
    module.init(address="local")
    return seen[0]


def test_defect_is_still_there():
    assert f'"{ray_start.SWITCH}"' in inspect.getsource(ray_constants)
    assert "raylet_start_wait_time_s = 30" in inspect.getsource(node.Node.__init__)
    assert start(patched=False), "the variable is set, and Ray has read it before"


def test_patch_mends_it(monkeypatch):
    assert not start()
    monkeypatch.setenv(ray_start.LIMIT, "90")
    with pytest.raises(RuntimeError, match=r"machine is busy.*RAY_raylet_start_wait_time_s \(now 90\)") as told:
        start(error=Exception(TOO_LATE))
    assert TOO_LATE in str(told.value) and "ray_kwargs.ray_init.address" in str(told.value)


def test_other_errors_pass():
    with pytest.raises(ValueError, match="something else"):
        start(error=ValueError("something else"))


@pytest.mark.parametrize("value", ["1", None])
def test_the_users_own_choice_stays(monkeypatch, value):
    monkeypatch.delenv(ray_start.SWITCH)
    if value:
        monkeypatch.setenv(ray_start.SWITCH, value)
    assert start()


def test_runs_of_other_strategies_are_left_alone(monkeypatch):
    monkeypatch.setattr(ours, "_driver_lives_here", False)
    assert start()
    with pytest.raises(Exception, match=f"^{TOO_LATE}"):
        start(error=Exception(TOO_LATE))


def test_it_is_applied():
    import megatrain_rl.verl_plugin.register  # noqa: F401
    from verl_patches.wrap import patches_of

    assert "verl_patches.ray_start" in patches_of(ray.init)


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="init"):
        ray_start.apply(empty("ray"))


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert "ray" not in asked(version) and "ray" in asked("0.9.1")
