"""Fixtures of the tests of patches; see tests/verl_world.py."""

from verl_world import cpu_platform, tiny_model, world

__all__ = ["cpu_platform", "tiny_model", "world"]
