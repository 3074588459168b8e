"""verl_patches/tracking_monitor.py: SFT's logger cannot be replaced, the patch has it watched, and no other; gate."""

import inspect
import types

import pytest
from patch_cases import OUTSIDE, asked, empty

from verl_patches import ours, tracking_monitor

OURS = {"actor_rollout_ref": {"actor": {"strategy": "megatrain"}}, "trainer": {}}
SFT = {"engine": {"strategy": "megatrain"}, "trainer": {}}
V1 = {"use_v1": True, "v1": {"trainer_mode": "sync"}}


def attached(config) -> bool:
    """Whether a logger with this config is handed on, by VERL's class with the patch over it."""
    seen = []

    class Tracking:
        def __init__(self, project_name, experiment_name, default_backend="console", config=None):
            self.given = (project_name, experiment_name, default_backend, config)

    module = types.ModuleType(tracking_monitor.MODULE)
    module.Tracking = Tracking
    for _ in range(2):
        tracking_monitor.apply(module, lambda tracking, config: seen.append((tracking, config)))
    made = Tracking("p", "e", default_backend=["file"], config=config)
    assert made.given == ("p", "e", ["file"], config) and seen in ([], [(made, config)])
    return bool(seen)


def test_defect_is_still_there():
    """The SFT trainer makes the logger in its main method, by the class's name, and no registry has that trainer."""
    import verl.trainer.sft_trainer as sft

    source = inspect.getsource(sft.SFTTrainer)
    assert "tracking = Tracking(" in source and "register" not in inspect.getsource(sft)


@pytest.mark.parametrize(
    "config, expected",
    [
        (SFT, True),
        (OURS, True),
        ({**OURS, "trainer": {**V1, "use_v1": False}}, True),
        ({**OURS, "trainer": V1}, True),
        ({"engine": {"strategy": "fsdp"}}, False),
        ({"actor_rollout_ref": {"actor": {"strategy": "fsdp"}, "ref": {"strategy": "megatrain"}}}, False),
        ({"engine": "vllm", "critic": 3, "actor_rollout_ref": ["of another library"]}, False),
        ("of another library", False),
        (None, False),
    ],
)
def test_patch_mends_it(monkeypatch, config, expected):
    """The logger is watched, but not in other runs, nor a second time where our own trainer has it watched."""
    monkeypatch.setattr(ours, "_trainer_lives_here", False)
    assert attached(config) == expected
    ours.note_trainer()
    assert not attached(config)


def test_missing_name_raises():
    with pytest.raises(AttributeError, match="Tracking"):
        tracking_monitor.apply(empty(tracking_monitor.MODULE), print)


@pytest.mark.parametrize("version", OUTSIDE)
def test_nothing_outside_the_gate(version):
    assert tracking_monitor.MODULE not in asked(version)
    assert tracking_monitor.MODULE in asked("0.9.1")
