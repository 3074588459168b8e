"""The entry point: found, idempotent, cheap, and loud when it fails."""

import importlib
import subprocess
import sys
from importlib.metadata import entry_points


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
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    assert {"megatrain_sync", "megatrain_colocate_async"} <= TRAINER_REGISTRY.keys()
    register.install()
    importlib.reload(register)


def test_failure_is_printed_and_light_import():
    """Loading imports no engine code, and an error that VERL would swallow is printed. In a process of its own."""
    code = """
import sys
import verl_patches
import verl
names = ("megatrain_rl.trainer", "megatrain_rl.verl_plugin.engine", "megatrain_rl.verl_plugin.driver", "vllm", "hydra")
heavy = [m for m in names if m in sys.modules]
import torch
print("heavy", heavy, "cuda", torch.cuda.is_initialized())
del sys.modules["megatrain_rl.verl_plugin.register"]
verl_patches.install = lambda *given, **more: 1 / 0
try:
    import megatrain_rl.verl_plugin.register
except ZeroDivisionError:
    print("raised")
sys.modules["verl_patches.untested_verl"] = None
del verl_patches.untested_verl
try:
    import megatrain_rl.verl_plugin.register
except ImportError:
    print("a failing import too")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "heavy [] cuda False" in done.stdout and "raised" in done.stdout, done.stdout + done.stderr
    assert "a failing import too" in done.stdout and done.stderr.count("could not be installed") == 2
    assert "VERL plug-in" in done.stderr and "ZeroDivisionError" in done.stderr
