"""Patches of VERL, one file per upstream limit; each says its symptom, cause, upstream place and when to remove it. retelling.py: what two share.

A patch wraps and never copies a body. All are for the VERL versions in GATE and do nothing outside. A patched name that
is missing inside the gate raises. Called by megatrain_rl.verl_plugin.register.
"""

from collections.abc import Callable
from importlib import metadata
from types import ModuleType

from packaging.specifiers import SpecifierSet

from verl_patches import (
    dead_trainer,
    failed_generation,
    no_detokenization,
    process_group_cpu,
    ref_in_actor,
    replay_buffer_poll,
    weight_transfer_socket,
    weight_transfer_timeout,
)

GATE = SpecifierSet(">=0.9.1,<0.10")

PATCHES = (
    process_group_cpu,
    ref_in_actor,
    replay_buffer_poll,
    failed_generation,
    dead_trainer,
    weight_transfer_timeout,
    weight_transfer_socket,
    no_detokenization,
)


def install(on_import: Callable, version: str | None = None) -> None:
    """Apply every patch when its module is imported. `version` is the installed VERL's unless a test says otherwise."""
    if (version or metadata.version("verl")) not in GATE:
        return
    for patch in PATCHES:
        for module, apply in hooks(patch).items():
            on_import(module, apply)


def hooks(patch: ModuleType) -> dict[str, Callable[[ModuleType], None]]:
    """What a patch does, by the module that it waits for: HOOKS where several change together, else its one MODULE and `apply`."""
    return getattr(patch, "HOOKS", None) or {patch.MODULE: patch.apply}
