"""What is not supported is refused here, in one line that names the setting: nothing is ignored silently.

`check_run` sees VERL's whole config in the driver, before Ray starts; `check_engine` sees the worker's share of it and
so also covers SFT and other entry points. Called by register.py and engine.py.
"""

import os
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.workers.config import EngineConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, OptimizerConfig

from megatrain_rl.verl_plugin import gpu_share, run_inputs, startup_times
from megatrain_rl.verl_plugin.config import REFERENCE_MARKER
from verl_patches import weight_transfer_timeout

# Read by a Ray cluster that this process starts.
_RAY_ENVIRONMENT = {
    # Host RAM is filled on purpose, up to the planned reserve; above 95 % in use Ray would kill a process that it holds guilty.
    "RAY_memory_monitor_refresh_ms": "0",
    # One idle Python process per core, 80 MB each, that VERL's run cannot use: its workers have an environment of their own.
    "RAY_prestart_worker_first_driver": "0",
}


def _refuse(condition: bool, setting: str, value: Any, instead: str) -> None:
    if condition:
        raise ValueError(f"{setting}={value}: not supported by strategy megatrain; {instead}")


def check_run(config: DictConfig) -> None:
    """Raise one ValueError if a run whose actor or reference is ours asks for what we do not have; fill in the rollout engine's context and
    its share of the card, and set the environment of a Ray cluster that this process will start."""
    roles = config.actor_rollout_ref
    critic = OmegaConf.select(config, "critic.strategy")
    for role in ("actor", "ref"):  # the streaming knobs under a role make its engine ours, whatever its strategy says
        if OmegaConf.select(roles, f"{role}.megatrain") is not None:
            setting = f"actor_rollout_ref.{role}.strategy"
            _refuse(
                roles[role].strategy != "megatrain",
                setting,
                roles[role].strategy,
                "choose another model_engine instead",
            )
    ours = "megatrain" in (roles.actor.strategy, roles.ref.strategy)
    if not ours and critic != "megatrain":
        return
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    _refuse(
        need_critic(config), "algorithm.adv_estimator", config.algorithm.adv_estimator,
        "critics are missing, set algorithm.adv_estimator=grpo or another estimator without a critic",
    )  # fmt: skip
    if not ours:
        return
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    _refuse(gpus > 1, "trainer.n_gpus_per_node x trainer.nnodes", gpus, "one GPU trains, set both to 1")
    unsupported = {
        "distillation.enabled": (False, "set it to false"),
        "actor_rollout_ref.actor.use_prefix_grouper": (False, "set it to false"),
        "actor_rollout_ref.actor.calculate_sum_pi_squared": (False, "set it to false"),
        "actor_rollout_ref.actor.qat.enable": (False, "set it to false"),
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": (1, "set it to 1"),
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": (1, "set it to 1"),
        "actor_rollout_ref.actor.router_replay.mode": ("disabled", "set it to disabled"),
        "actor_rollout_ref.model.mtp.enable": (False, "set it to false"),
        "actor_rollout_ref.model.lora_rank": (0, "set it to 0, all parameters are trained"),
        "actor_rollout_ref.model.lora.rank": (0, "set it to 0, all parameters are trained"),
        "actor_rollout_ref.actor.checkpoint.async_save": (False, "set it to false, checkpoints are written at once"),
        "trainer.default_hdfs_dir": (None, "set it to null and copy trainer.default_local_dir"),
    }
    for setting, (supported, instead) in unsupported.items():
        # a config of another model engine lacks some of these nodes: absent means not asked for
        value = OmegaConf.select(config, setting)
        _refuse(value is not None and value != supported, setting, value, instead)
    _check_adapter(roles.model.lora_adapter_path, "actor_rollout_ref.model.")
    separate = OmegaConf.select(roles, "ref.megatrain") is not None and roles.model.lora_adapter_path is None
    _refuse(
        separate and config.trainer.device == "cuda" and need_reference_policy(config),
        "actor_rollout_ref.model.lora_adapter_path", None,
        "a reference engine of its own would plan the same GPU budget a second time, leave the setting at its default",
    )  # fmt: skip
    foreign = roles.actor.strategy == "megatrain" and roles.ref.strategy != "megatrain"
    _refuse(
        foreign and config.trainer.device == "cuda" and need_reference_policy(config),
        "actor_rollout_ref.ref.strategy", roles.ref.strategy,
        "a reference of another engine in the trainer's process has no room in its GPU budget, set it to megatrain",
    )  # fmt: skip
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    one_gpu = "set it to sync or colocate_async, which share one GPU"
    _refuse(config.trainer.use_v1 and mode == "separate_async", "trainer.v1.trainer_mode", mode, one_gpu)
    setting = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    backend = OmegaConf.select(config, setting)
    _refuse(backend == "delta_sharded", setting, backend, "set it to naive")
    loss_mode = OmegaConf.select(roles, "actor.policy_loss.loss_mode")
    per_call = "it picks tokens among those of one micro-batch, so the update would depend on how packs are cut"
    _refuse(loss_mode in ("clip_cov", "kl_cov"), "actor_rollout_ref.actor.policy_loss.loss_mode", loss_mode, per_call)
    run_inputs.resolve_context(config)
    run_inputs.check_mini_batch(config)
    run_inputs.check_loggers(config)
    run_inputs.check_disk(config)
    gpu_share.resolve(config)
    weight_transfer_timeout.limit_seconds()
    startup_times.note_start()
    for name, value in _RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _check_adapter(path: str | None, prefix: str) -> None:
    _refuse(path not in (None, REFERENCE_MARKER), f"{prefix}lora_adapter_path", path, "set it to null")


def check_engine(
    *,
    model: HFModelConfig,
    engine: EngineConfig,
    optim: OptimizerConfig | None,
    world_size: int,
    load_contents: list[str],
    async_save: bool,
) -> None:
    """Raise one ValueError if the worker's configs ask for what the engine does not have."""
    one_process = "one process trains, set trainer.n_gpus_per_node=1 (SFT: --nproc_per_node=1)"
    _refuse(world_size > 1, "world size", world_size, one_process)
    _refuse(model.lora_rank > 0, "model.lora_rank", model.lora_rank, "set it to 0, all parameters are trained")
    rank = model.lora["rank"] if "rank" in model.lora else 0
    _refuse(rank > 0, "model.lora.rank", rank, "set it to 0, all parameters are trained")
    _check_adapter(model.lora_adapter_path, "model.")
    _refuse(model.mtp.enable, "model.mtp.enable", True, "set it to false")
    kind = model.hf_config.model_type
    _refuse("vision_config" in model.hf_config.to_dict(), "model.path (a vision model)", kind, "use a text model")
    mode = engine.router_replay.mode
    _refuse(mode != "disabled", "router_replay.mode", mode, "set it to disabled")
    if isinstance(engine, FSDPEngineConfig):
        size = engine.ulysses_sequence_parallel_size
        _refuse(size > 1, "ulysses_sequence_parallel_size", size, "set it to 1")
        _refuse(engine.qat.enable, "qat.enable", True, "set it to false")
    if isinstance(optim, FSDPOptimizerConfig):
        name = f"{optim.optimizer_impl}.{optim.optimizer}"
        adamw = "torch.optim.AdamW"
        _refuse(name != adamw, "optim.optimizer_impl.optimizer", name, f"the update is AdamW, use {adamw}")
        _refuse(not optim.zero_indexed_step, "optim.zero_indexed_step", False, "set it to true")
    _refuse(async_save, "checkpoint.async_save", True, "set it to false, checkpoints are written at once")
    missing = {"model", "optimizer", "extra"} - set(load_contents)
    _refuse(
        optim is not None and bool(missing), "checkpoint.load_contents", load_contents,
        "a checkpoint is always complete, use [model,optimizer,extra]",
    )  # fmt: skip
