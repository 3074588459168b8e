"""Every change to code of other libraries is here: one file per limit of theirs, all listed in README.md.

A patch wraps a function (wrap.py) and never copies a body. It is applied when its module is imported, in tested
versions only (versions.py), and it changes something only in a run of ours (ours.py). A name that is missing in a
tested version raises. Nothing here imports megatrain_rl: functions of it that a patch calls are handed to `install` by
megatrain_rl.verl_plugin.register.
"""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from verl_patches import (
    before_ray,
    before_sft,
    engine_memory_cap,
    hydra_overrides,
    log_prob_gap,
    loopback_stores,
    no_detokenization,
    process_group_cpu,
    ray_start,
    resumed_epoch,
    reward_values,
    tracking_monitor,
    trainer_mode,
    transfer_queue_start,
    versions,
    weight_transfer_socket,
    weight_transfer_timeout,
)

Hook = Callable[[ModuleType], None]

PATCHES = (
    ray_start,
    process_group_cpu,
    loopback_stores,
    weight_transfer_timeout,
    weight_transfer_socket,
    no_detokenization,
    engine_memory_cap,
    transfer_queue_start,
    trainer_mode,
    resumed_epoch,
    reward_values,
)


def install(
    on_import: Callable[[str, Hook], None],
    *,
    prepare: Callable[[Any], None],
    prepare_sft: Callable[[Any], None],
    check_overrides: Callable[[list[str]], None],
    attach_monitor: Callable[[Any, dict[str, Any]], object],
    compare_log_probs: Callable[[Any], dict[str, float]],
    found: Mapping[str, str] | None = None,
) -> None:
    """Have every patch applied when its module is imported.

    on_import: registers a hook for a module's import (post_import.py).
    prepare, prepare_sft, check_overrides, attach_monitor, compare_log_probs: see before_ray.py, before_sft.py,
        hydra_overrides.py, tracking_monitor.py and log_prob_gap.py.
    found: versions that take the place of the installed ones.
    """
    for patch in PATCHES:
        if versions.hold(patch.VERSIONS, found):
            for module, apply in hooks(patch).items():
                on_import(module, apply)
    called: list[tuple[ModuleType, Callable[..., Any]]] = [
        (before_ray, prepare),
        (before_sft, prepare_sft),
        (hydra_overrides, check_overrides),
        (tracking_monitor, attach_monitor),
        (log_prob_gap, compare_log_probs),
    ]
    for patch, call in called:
        if versions.hold(patch.VERSIONS, found):
            on_import(patch.MODULE, functools.partial(_apply, patch.apply, call))


def hooks(patch: ModuleType) -> dict[str, Hook]:
    """A patch's hooks, by the module that each waits for.

    A patch that changes several modules together has HOOKS; any other has one MODULE and `apply`.
    """
    return getattr(patch, "HOOKS", None) or {patch.MODULE: patch.apply}


def _apply(apply: Callable[..., None], call: Callable[..., Any], module: ModuleType) -> None:
    apply(module, call)
