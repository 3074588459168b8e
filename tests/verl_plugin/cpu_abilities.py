"""What VERL's own engines need to run without a GPU, and nothing of our engine.

It is a CPU platform, process groups on it, and a rollout. Runs that are to be the same with and without the plug-in
name this module in VERL_USE_EXTERNAL_MODULES; the plug-in's entry point brings these things too.
"""

from types import ModuleType

from verl_patches import process_group_cpu
from verl_patches.post_import import on_import


def _platform(_: ModuleType) -> None:
    import megatrain_rl.verl_plugin.platform_cpu  # noqa: F401  (its decorator registers)


def _adapter(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY[("embedded", "async")] = "megatrain_rl.rollout.embedded.EmbeddedServerAdapter"


def _replica(module: ModuleType) -> None:
    def load():
        from megatrain_rl.rollout.embedded import EmbeddedReplica

        return EmbeddedReplica

    module.RolloutReplicaRegistry.register("embedded", load)


on_import("verl.plugin.platform.platform_manager", _platform)
on_import("verl.workers.rollout.base", _adapter)
on_import("verl.workers.rollout.replica", _replica)
on_import(process_group_cpu.MODULE, process_group_cpu.apply)
