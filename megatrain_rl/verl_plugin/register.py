"""The `verl.plugins` entry point: VERL imports this module at the end of `import verl`, in every process.

Invariants: cheap (only hooks are installed, no model code is imported), idempotent, no CUDA call. VERL reports a plug-in
that raises at DEBUG level only, so a failure is printed here before it is raised; without our hooks the later look-up
of the engine or of `model_engine=megatrain` fails too.
"""

import functools
import sys
import traceback
from types import ModuleType

from megatrain_rl.verl_plugin import hydra_groups
from verl_patches.post_import import on_import

_EMBEDDED_ADAPTER = "megatrain_rl.rollout.embedded.EmbeddedServerAdapter"

_installed = False


def install() -> None:
    """Install every hook once. Called at import below and by config.py, which a yaml's `_target_` imports."""
    global _installed
    if _installed:
        return
    import verl_patches

    on_import("verl.plugin.platform.platform_manager", _register_cpu_platform)
    on_import("verl.workers.engine", _register_engine)
    on_import("verl.workers.rollout.base", _register_rollout_adapter)
    on_import("verl.workers.rollout.replica", _register_rollout_replica)
    on_import("verl.utils.config", _check_before_ray)
    on_import("verl.trainer.ppo.v1.trainer_base", _time_startup)
    on_import("verl.trainer.ppo.v1.trainer_base", _overlap_startup)
    on_import("verl.trainer.ppo.v1.trainer_base", _watch_startup)
    on_import("verl.utils.tracking", _watch_tracking)
    on_import("verl.utils.debug.metrics", _watch_log_probs)
    hydra_groups.install(on_import)
    verl_patches.install(on_import)
    _installed = True


def _register_cpu_platform(_: ModuleType) -> None:
    import megatrain_rl.verl_plugin.platform_cpu  # noqa: F401  (its decorator registers)


def _register_engine(_: ModuleType) -> None:
    import megatrain_rl.verl_plugin.engine.engine  # noqa: F401  (its decorator registers)


def _register_rollout_adapter(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY[("embedded", "async")] = _EMBEDDED_ADAPTER


def _register_rollout_replica(module: ModuleType) -> None:
    def load():
        from megatrain_rl.rollout.embedded import EmbeddedReplica

        return EmbeddedReplica

    module.RolloutReplicaRegistry.register("embedded", load)


def _check_before_ray(module: ModuleType) -> None:
    """VERL's mains call `validate_config` in the driver before Ray starts and offer no hook there: ours goes first."""
    validate = module.validate_config

    @functools.wraps(validate)
    def validate_config(config, *args, **kwargs) -> None:
        from megatrain_rl.verl_plugin import preflight

        preflight.check_run(config)
        validate(config, *args, **kwargs)

    module.validate_config = validate_config


def _time_startup(module: ModuleType) -> None:
    from megatrain_rl.verl_plugin import startup_times

    startup_times.install(module)


def _overlap_startup(module: ModuleType) -> None:
    from megatrain_rl.verl_plugin import startup_overlap

    startup_overlap.install(module)


def _watch_startup(module: ModuleType) -> None:
    from megatrain_rl.verl_plugin import run_monitor

    run_monitor.watch_startup(module)


def _watch_tracking(module: ModuleType) -> None:
    from megatrain_rl.verl_plugin import run_monitor

    run_monitor.watch_tracking(module)


def _watch_log_probs(module: ModuleType) -> None:
    from megatrain_rl.verl_plugin import run_monitor

    run_monitor.watch_log_probs(module)


try:
    install()
except Exception:
    print("megatrain_rl: the VERL plug-in could not be installed:", file=sys.stderr)
    traceback.print_exc()
    raise
