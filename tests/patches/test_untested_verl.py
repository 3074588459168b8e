"""On another VERL a run of ours is refused in one line. Other runs do not notice the plug-in, whatever it lacks."""

import os
import re
import subprocess
import sys
import types

import pytest
from patch_cases import OUTSIDE, asked, empty

from verl_patches import untested_verl, versions
from verl_patches.wrap import patches_of

OURS = {"actor_rollout_ref": {"actor": {"strategy": "megatrain"}}}
OTHERS = {"actor_rollout_ref": {"actor": {"strategy": "fsdp"}}}


@pytest.fixture
def hooks(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda name: "0.10.0.dev0")
    found = {}
    untested_verl.install(lambda module, hook: found.setdefault(module, hook))
    return found


@pytest.mark.parametrize("version", OUTSIDE)
def test_no_patch_of_verl_is_applied(version):
    assert not any(name.startswith("verl") or name == "transfer_queue" for name in asked(version))


def test_what_is_missing_there_is_passed_over(hooks):
    assert hooks.keys() == {"hydra._internal.config_loader_impl", "verl.utils.config", "verl.workers.engine"}
    for name, hook in hooks.items():
        hook(empty(name))


def config_module():
    module = types.ModuleType("verl.utils.config")
    module.validate_config = lambda config, use_critic=None: ("checked", config)
    return module


def test_a_run_of_ours_is_refused_in_one_line(hooks):
    module = config_module()
    hooks["verl.utils.config"](module)
    for call in (lambda: module.validate_config(OURS), lambda: module.validate_config(config=OURS, use_critic=False)):
        with pytest.raises(ValueError, match=r"verl==0\.9\.1.*0\.10\.0\.dev0") as refusal:
            call()
        assert "\n" not in str(refusal.value)
    assert module.validate_config(OTHERS, use_critic=False) == ("checked", OTHERS)
    assert module.validate_config("a config of another form") == ("checked", "a config of another form")


def test_the_command_line_is_refused_before_it_is_composed(hooks):
    from hydra.errors import ConfigCompositionException

    class ConfigLoaderImpl:
        def load_configuration(self, config_name, overrides, run_mode):
            return "composed", overrides

    module = types.ModuleType("hydra._internal.config_loader_impl")
    module.ConfigLoaderImpl = ConfigLoaderImpl
    hooks[module.__name__](module)
    for override in (
        "model_engine=megatrain",
        "engine=megatrain",
        "actor_rollout_ref.actor.strategy=megatrain",
        "+engine=megatrain",
    ):
        with pytest.raises(ConfigCompositionException, match=r"verl==0\.9\.1"):
            ConfigLoaderImpl().load_configuration("x", ["a=b", override], run_mode=1)
    others = ["model_engine=dp", "trainer.project_name=megatrain"]
    assert ConfigLoaderImpl().load_configuration("x", others, run_mode=1) == ("composed", others)


def test_the_engine_is_refused_where_nothing_is_checked_before(hooks):
    made = {}

    class EngineRegistry:
        @staticmethod
        def register(model_type, backend, device):
            return lambda cls: made.setdefault((model_type, backend, tuple(device)), cls)

    module = types.ModuleType("verl.workers.engine")
    module.BaseEngine, module.EngineRegistry = object, EngineRegistry
    hooks[module.__name__](module)
    [engine] = made.values()
    with pytest.raises(ValueError, match=r"verl==0\.9\.1"):
        engine(model_config=None)


def test_the_plug_in_as_a_whole_on_another_version():
    """VERL imports as ever, no patch is over it, and a command line of ours is refused. In a process of its own."""
    code = """
import importlib.metadata as m
real = m.version
m.version = lambda name: "0.9.2.dev0" if name == "verl" else real(name)
import verl, verl.utils.tracking, verl.trainer.ppo.v1, verl.workers.engine, verl.utils.config, transfer_queue
from verl_patches.wrap import patches_of
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
print(sorted(TRAINER_REGISTRY), patches_of(verl.utils.tracking.Tracking.__init__), patches_of(transfer_queue.init))
print(patches_of(verl.utils.config.validate_config))
from hydra import compose, initialize_config_module
with initialize_config_module("verl.trainer.config", version_base=None):
    compose("ppo_trainer", overrides=[])
    compose("ppo_trainer", overrides=["model_engine=megatrain"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert "['colocate_async', 'separate_async', 'sync'] () ()" in done.stdout, done.stdout + done.stderr
    assert "('verl_patches.untested_verl',)" in done.stdout
    assert done.returncode == 1
    assert re.search(r"^\S*ConfigCompositionException: .*verl==0\.9\.1", done.stderr, re.MULTILINE), done.stderr


def test_the_tested_version_has_its_patches():
    import verl.utils.tracking

    assert patches_of(verl.utils.tracking.Tracking.__init__) == ("verl_patches.tracking_monitor",)
