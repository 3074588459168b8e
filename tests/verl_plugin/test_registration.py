"""The entry point: found, idempotent, cheap, and loud when it fails."""

import importlib
import subprocess
import sys
from importlib.metadata import entry_points

import pytest


def test_entry_point_is_registered():
    [ours] = [entry for entry in entry_points(group="verl.plugins") if entry.name == "megatrain"]
    assert ours.value == "megatrain_rl.verl_plugin.register"


def test_engine_rollout_and_platform_are_found():
    import verl  # noqa: F401
    from verl.plugin.platform.platform_manager import PlatformRegistry
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from megatrain_rl.verl_plugin import register

    assert EngineRegistry.get_engine_cls("language_model", "megatrain").__name__ == "MegaTrainEngine"
    assert EngineRegistry._engines["language_model"]["megatrain"].keys() == {"cuda", "cpu"}
    assert ("embedded", "async") in _ROLLOUT_REGISTRY
    assert RolloutReplicaRegistry.get("embedded").__name__ == "EmbeddedReplica"
    assert "cpu" in PlatformRegistry.registered_names()
    register.install()
    importlib.reload(register)


@pytest.fixture
def module_on_disk(tmp_path, monkeypatch):
    (tmp_path / "mt_hooked_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "mt_hooked_module"
    sys.modules.pop("mt_hooked_module", None)


def test_hooks_run_after_import_and_at_once_if_imported(module_on_disk):
    from verl_patches.post_import import on_import

    seen = []
    on_import(module_on_disk, lambda m: seen.append(("first", m.VALUE)))
    on_import(module_on_disk, lambda m: seen.append(("second", m.VALUE)))
    assert seen == []
    importlib.import_module(module_on_disk)
    assert seen == [("first", 1), ("second", 1)]
    on_import(module_on_disk, lambda m: seen.append(("late", m.VALUE)))
    assert seen[-1] == ("late", 1)


def test_failing_hook_fails_the_import(module_on_disk):
    from verl_patches.post_import import on_import

    def fail(_):
        raise RuntimeError("engine could not be registered")

    seen = []
    on_import(module_on_disk, lambda m: seen.append(m))
    on_import(module_on_disk, fail)
    for times in (1, 2):  # an import that swallowed the error must not lead to a module without its hooks
        with pytest.raises(RuntimeError, match="could not be registered"):
            importlib.import_module(module_on_disk)
        assert len(seen) == times and module_on_disk not in sys.modules


def test_failure_is_printed_and_light_import():
    """In a process of its own: loading touches no engine code, and what VERL would swallow is printed."""
    code = """
import sys
from megatrain_rl.verl_plugin import hydra_groups
import verl
heavy = [m for m in ("megatrain_rl.trainer", "megatrain_rl.verl_plugin.engine", "vllm", "hydra") if m in sys.modules]
import torch
print("heavy", heavy, "cuda", torch.cuda.is_initialized())
del sys.modules["megatrain_rl.verl_plugin.register"]
hydra_groups.install = lambda on_import: 1 / 0
try:
    import megatrain_rl.verl_plugin.register
except ZeroDivisionError:
    print("raised")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "heavy [] cuda False" in done.stdout and "raised" in done.stdout, done.stdout + done.stderr
    assert "the VERL plug-in could not be installed" in done.stderr and "ZeroDivisionError" in done.stderr
