"""The `verl.plugins` entry point: VERL imports this module at the end of `import verl`, in every process.

Invariants: the import is cheap (only hooks are installed, no model code is imported), idempotent, makes no CUDA call
and has no effect on runs of other strategies. VERL reports a plug-in that raises at DEBUG level only, so a failure is
printed here before it is raised. Without our hooks VERL also fails later, when it looks for the engine or for
`model_engine=megatrain`.
"""

import sys
import traceback
from types import ModuleType
from typing import Any

_EMBEDDED_ADAPTER = "megatrain_rl.rollout.embedded.EmbeddedServerAdapter"

_installed = False


def install() -> None:
    """Install every hook, once. Called when this module is imported, and by targets.py."""
    global _installed
    if _installed:
        return
    # imported here, so that a failing import is told too
    import verl_patches
    from verl_patches import untested_verl, versions
    from verl_patches.post_import import on_import

    if versions.verl_is_tested():
        on_import("verl.plugin.platform.platform_manager", _register_cpu_platform)
        on_import("verl.workers.engine", _register_engine)
        on_import("verl.workers.rollout.base", _register_rollout_adapter)
        on_import("verl.workers.rollout.replica", _register_rollout_replica)
        on_import("verl.trainer.ppo.v1", _register_trainers)
        on_import("hydra.core.plugins", _add_config_groups)
        verl_patches.install(
            on_import,
            prepare=_prepare,
            prepare_sft=_prepare_sft,
            check_overrides=_check_overrides,
            attach_monitor=_attach_monitor,
            compare_log_probs=_compare_log_probs,
        )
    else:
        untested_verl.install(on_import)
    _installed = True


# ---- hooks that register our classes with VERL and Hydra ----


def _register_cpu_platform(_: ModuleType) -> None:
    import megatrain_rl.verl_plugin.platform_cpu  # noqa: F401  (its decorator registers)


def _register_engine(_: ModuleType) -> None:
    import megatrain_rl.verl_plugin.engine.engine  # noqa: F401  (its decorator registers)


def _register_trainers(_: ModuleType) -> None:
    import megatrain_rl.verl_plugin.task_runner.trainer  # noqa: F401  (its decorators register)


def _register_rollout_adapter(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY[("embedded", "async")] = _EMBEDDED_ADAPTER


def _register_rollout_replica(module: ModuleType) -> None:
    def load():
        from megatrain_rl.rollout.embedded import EmbeddedReplica

        return EmbeddedReplica

    module.RolloutReplicaRegistry.register("embedded", load)


def _add_config_groups(module: ModuleType) -> None:
    from megatrain_rl.verl_plugin.driver import hydra_groups

    hydra_groups.add_search_path(module.Plugins.instance())


# ---- calls that patches make; what they need is imported only then ----


def _compare_log_probs(data: Any) -> dict[str, float]:
    from megatrain_rl.verl_plugin import monitoring

    return monitoring.compare(data)


def _prepare(config: Any) -> None:
    from verl_patches import ours

    if not ours.concerns_us(config):
        return  # the driver of another strategy's run imports nothing of ours
    from megatrain_rl.verl_plugin.driver import prepare

    prepare.prepare(config)


def _prepare_sft(config: Any) -> None:
    from megatrain_rl.verl_plugin.driver import prepare

    prepare.prepare_sft(config)


def _check_overrides(overrides: list[str]) -> None:
    from megatrain_rl.verl_plugin.driver import hydra_groups

    hydra_groups.check_overrides(overrides)


def _attach_monitor(tracking: Any, config: dict[str, Any]) -> None:
    from megatrain_rl.verl_plugin import monitoring

    monitoring.attach(tracking, config)


try:
    install()
except Exception:
    print("megatrain_rl: the VERL plug-in could not be installed:", file=sys.stderr)
    traceback.print_exc()
    raise
