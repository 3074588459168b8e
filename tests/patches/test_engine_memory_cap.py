"""verl_patches/engine_memory_cap.py with a stand-in for VERL's server, test_budget_gpu.py has torch's own reading."""

import importlib.util
import os
import types
from pathlib import Path

import pytest
from patch_cases import OUTSIDE, asked, empty

from verl_patches import engine_memory_cap, ours
from verl_patches.engine_memory_cap import VARIABLES
from verl_patches.versions import hold

NEW, OLD = VARIABLES
PLAN = {"engine_torch_fraction": 0.91234}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    for name in VARIABLES:
        os.environ.pop(name, None)


def start(custom, *, patched: bool = True) -> dict[str, str]:
    """The allocator's options that the engine's processes inherit."""

    class vLLMHttpServer:
        def __init__(self, config):
            self.config = config

    module = types.SimpleNamespace(vLLMHttpServer=vLLMHttpServer)
    if patched:
        engine_memory_cap.apply(module)
        engine_memory_cap.apply(module)
    module.vLLMHttpServer(types.SimpleNamespace(custom=custom))
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def test_defect_is_still_there():
    folder = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "workers/rollout/vllm_rollout"
    assert "memory_fraction" not in "".join(file.read_text() for file in folder.glob("*.py"))
    assert start(ours.marked(None, PLAN), patched=False) == {}


def test_patch_mends_it():
    assert start(ours.marked({"mine": 1}, PLAN)) == {OLD: "per_process_memory_fraction:0.9123"}


@pytest.mark.parametrize("name", VARIABLES)
def test_options_of_the_user_stay(monkeypatch, name):
    monkeypatch.setenv(name, "expandable_segments:True")
    assert start(ours.marked(None, PLAN)) == {name: "expandable_segments:True,per_process_memory_fraction:0.9123"}
    monkeypatch.setenv(name, "per_process_memory_fraction:0.5")
    assert start(ours.marked(None, PLAN)) == {name: "per_process_memory_fraction:0.5"}


@pytest.mark.parametrize("custom", [None, {"mine": 1}, ours.marked(None), {"mine": PLAN}])
def test_a_card_that_was_not_divided_by_us(custom):
    assert start(custom) == {}


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="vLLMHttpServer"):
        engine_memory_cap.apply(empty(engine_memory_cap.MODULE))


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    """Other patches wait for the same module, so the range of versions itself is looked at."""
    for found in ({"verl": version}, {"torch": "2.10.1"}):
        assert not hold(engine_memory_cap.VERSIONS, {"verl": "0.9.1"} | found)
    assert hold(engine_memory_cap.VERSIONS, {"verl": "0.9.1", "torch": "2.11.0+cu130"})
    assert engine_memory_cap.MODULE not in asked(version)
    assert engine_memory_cap.MODULE in asked("0.9.1")
