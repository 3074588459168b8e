"""A gloo world of one and a tiny random Qwen2 for the tests of the VERL plug-in. All on the CPU platform."""

import os

import pytest

for name, value in {
    "VERL_PLATFORM": "cpu",
    "WANDB_MODE": "offline",  # VERL's default has wandb among the loggers
    "TOKENIZERS_PARALLELISM": "false",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29531",
}.items():
    os.environ[name] = value


@pytest.fixture(scope="session", autouse=True)
def cpu_platform():
    """VERL's platform is the CPU, even if another test made VERL choose one before the environment above was set."""
    import verl  # noqa: F401  (loads the plug-in, which registers the platform)
    from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform

    set_platform(PlatformRegistry.get("cpu")())


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    import torch.distributed as dist

    rendezvous = f"file://{tmp_path_factory.mktemp('pg')}/rendezvous"
    dist.init_process_group("cpu:gloo", init_method=rendezvous, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    from verl_cases import save_tiny_model

    return save_tiny_model(str(tmp_path_factory.mktemp("model")))
