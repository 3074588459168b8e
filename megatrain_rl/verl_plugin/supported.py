"""A run that asks for something unsupported is refused in one line that names the setting. Nothing is ignored silently.

`check_run` sees VERL's whole config in the driver, before Ray starts. `check_engine` sees the part that a worker gets,
and so it covers SFT and other entry points too. Called by driver/prepare.py and engine/engine.py. No function here
changes anything.
"""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import PretrainedConfig
from verl.workers.config import EngineConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, OptimizerConfig

from megatrain_rl.verl_plugin import settings
from megatrain_rl.verl_plugin.config import REFERENCE_MARKER
from verl_patches.ours import STRATEGY, our_roles


def _refuse(condition: bool, setting: str, value: Any, instead: str) -> None:
    if condition:
        raise ValueError(f"{setting}={value}: not supported by strategy megatrain; {instead}")


def check_run(config: DictConfig) -> None:
    """Raise a ValueError if a run asks for something that our engine in one of its roles does not support.

    A role is a part of VERL's config with a strategy of its own: actor, ref, critic. Runs of other strategies pass.
    """
    ours = our_roles(config)
    _check_knobs_are_ours(config)
    if not ours:
        return
    from verl.trainer.ppo.utils import need_critic

    _refuse(bool(config.critic.enable), "critic.enable", True, "critics are missing, set it to false")
    _refuse(
        need_critic(config), "algorithm.adv_estimator", config.algorithm.adv_estimator,
        "critics are missing, set algorithm.adv_estimator=grpo or another estimator without a critic",
    )  # fmt: skip
    if ours.isdisjoint({"actor", "ref"}):
        return
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    _refuse(gpus > 1, "trainer.n_gpus_per_node x trainer.nnodes", gpus, "one GPU trains, set both to 1")
    for setting, (supported, instead) in _UNSUPPORTED.items():
        # the config of another model engine lacks some of these settings; an absent one was not asked for
        value = OmegaConf.select(config, setting)
        _refuse(value is not None and value != supported, setting, value, instead)
    _check_adapter(config.actor_rollout_ref.model.lora_adapter_path, "actor_rollout_ref.model.")
    _check_parts(config, ours)
    _check_reference(config)
    _check_order_of_a_run(config)
    _check_bypass_mode(config)


# Setting: (the supported value, what to do instead of another one).
_UNSUPPORTED = {
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


def _check_parts(config: DictConfig, ours: set[str]) -> None:
    roles = "actor_rollout_ref"
    parts = {f"{roles}.model": settings.MODEL}
    if "actor" in ours:
        known = any(
            OmegaConf.select(config, f"{roles}.actor.{part}") is not None for part in ("fsdp_config", "megatrain")
        )
        _refuse(not known, "model_engine", config.model_engine, "set it to megatrain, or leave it at VERL's default")
        contents = config.actor_rollout_ref.actor.checkpoint.load_contents
        _check_contents(contents, f"{roles}.actor.checkpoint.load_contents")
        parts |= {f"{roles}.actor": settings.ACTOR, f"{roles}.actor.checkpoint": settings.CHECKPOINT}
    settings.check(settings.RUN, config, "")
    for role in ours & {"actor", "ref"}:
        parts[f"{roles}.{role}.fsdp_config"] = settings.ENGINE
    for path, part in parts.items():
        given = OmegaConf.select(config, path)
        if given is not None:
            settings.check(part, given, f"{path}.")


def check_sft(config: DictConfig) -> None:
    """Tell the settings of an SFT run of ours that have no effect. What is refused there, the engine refuses."""
    settings.check(settings.MODEL, config.model, "model.")
    settings.check(settings.CHECKPOINT, config.checkpoint, "checkpoint.")


def _check_knobs_are_ours(config: DictConfig) -> None:
    """Refuse another strategy in a role whose config has our streaming knobs: they already make its engine ours."""
    roles = config.actor_rollout_ref
    for role in ("actor", "ref"):
        if OmegaConf.select(roles, f"{role}.megatrain") is not None:
            setting, strategy = f"actor_rollout_ref.{role}.strategy", roles[role].strategy
            _refuse(strategy != STRATEGY, setting, strategy, "choose another model_engine instead")


def _check_reference(config: DictConfig) -> None:
    """Refuse a reference beside the trainer on a GPU: there the actor's engine is the reference, or there is none."""
    from verl.trainer.ppo.utils import need_reference_policy

    roles = config.actor_rollout_ref
    if config.trainer.device != "cuda" or not need_reference_policy(config):
        return
    _refuse(
        OmegaConf.select(roles, "ref.megatrain") is not None and roles.model.lora_adapter_path is None,
        "actor_rollout_ref.model.lora_adapter_path", None,
        "a reference engine of its own would plan the same GPU budget a second time, leave the setting at its default",
    )  # fmt: skip
    _refuse(
        roles.actor.strategy == STRATEGY and roles.ref.strategy != STRATEGY,
        "actor_rollout_ref.ref.strategy", roles.ref.strategy,
        "a reference of another engine in the trainer's process has no room in its GPU budget, set it to megatrain",
    )  # fmt: skip


def _check_order_of_a_run(config: DictConfig) -> None:
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    one_gpu = "set it to sync or colocate_async, which share one GPU"
    _refuse(config.trainer.use_v1 and mode == "separate_async", "trainer.v1.trainer_mode", mode, one_gpu)
    setting = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    backend = OmegaConf.select(config, setting)
    _refuse(backend == "delta_sharded", setting, backend, "set it to naive")
    judge = config.reward.reward_model
    _refuse(
        config.trainer.device == "cuda" and judge.enable and not judge.enable_resource_pool,
        "reward.reward_model.enable", True,
        "the division of the GPU has no share for it, set reward.reward_model.enable_resource_pool=true for a GPU of its own",
    )  # fmt: skip


def _check_bypass_mode(config: DictConfig) -> None:
    """Refuse a correction of bypass mode that is set where VERL's actor, which computes it, does not get it."""
    wanted = OmegaConf.select(config, "algorithm.rollout_correction")
    if not wanted or not wanted.bypass_mode:
        return
    where = "actor_rollout_ref.actor.policy_loss"
    actor = OmegaConf.select(config, f"{where}.rollout_correction") or {}
    in_actor = OmegaConf.select(config, f"{where}.loss_mode") == "bypass_mode"
    # what these settings do without bypass mode's loss: PPO's clipped loss on every token
    keys: dict[str, Any] = {"loss_type": "ppo_clip", "rollout_rs": None}
    if wanted.get("rollout_rs"):
        keys["rollout_rs_threshold"] = None
    if wanted.get("loss_type") == "reinforce":  # PPO's loss takes no importance weights
        keys |= {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False}
    for key, without in keys.items():
        value, got = wanted.get(key, without), actor.get(key, without) if in_actor else without
        _refuse(
            str(value) != str(got), f"algorithm.rollout_correction.{key}", value,
            f"VERL hands it to no actor, set {where}.loss_mode=bypass_mode and +{where}.rollout_correction to the same",
        )  # fmt: skip


def _check_adapter(path: str | None, prefix: str) -> None:
    _refuse(path not in (None, REFERENCE_MARKER), f"{prefix}lora_adapter_path", path, "set it to null")


def check_model_code(model: PretrainedConfig, *, trusted: bool) -> None:
    """Raise a ValueError if transformers would run code of the model's folder: the layers here are transformers' own.

    Without trust_remote_code transformers, too, takes its own class for a model type that it knows.
    """
    code = (model.to_dict().get("auto_map") or {}).get("AutoModelForCausalLM")
    _refuse(
        trusted and code is not None, "model.trust_remote_code", True,
        f"the folder's own model code ({code}) is not run, set it to false to train transformers' {model.model_type}",
    )  # fmt: skip


def check_engine(
    *,
    model: HFModelConfig,
    engine: EngineConfig,
    optim: OptimizerConfig | None,
    world_size: int,
    load_contents: list[str],
    async_save: bool,
) -> None:
    """Raise a ValueError if the worker's configs ask for something that the engine does not support."""
    one_process = "one process trains, set trainer.n_gpus_per_node=1 (SFT: --nproc_per_node=1)"
    _refuse(world_size > 1, "world size", world_size, one_process)
    _refuse(model.lora_rank > 0, "model.lora_rank", model.lora_rank, "set it to 0, all parameters are trained")
    rank = model.lora.get("rank", 0)
    _refuse(rank > 0, "model.lora.rank", rank, "set it to 0, all parameters are trained")
    _check_adapter(model.lora_adapter_path, "model.")
    _refuse(model.mtp.enable, "model.mtp.enable", True, "set it to false")
    kind = model.hf_config.model_type
    _refuse("vision_config" in model.hf_config.to_dict(), "model.path (a vision model)", kind, "use a text model")
    check_model_code(model.hf_config, trusted=model.trust_remote_code)
    mode = engine.router_replay.mode
    _refuse(mode != "disabled", "router_replay.mode", mode, "set it to disabled")
    if isinstance(engine, FSDPEngineConfig):
        size = engine.ulysses_sequence_parallel_size
        _refuse(size > 1, "ulysses_sequence_parallel_size", size, "set it to 1")
        _refuse(engine.qat.enable, "qat.enable", True, "set it to false")
        settings.check(settings.ENGINE, engine, "engine.")
    if isinstance(optim, FSDPOptimizerConfig):
        name = f"{optim.optimizer_impl}.{optim.optimizer}"
        adamw = "torch.optim.AdamW"
        _refuse(name != adamw, "optim.optimizer_impl.optimizer", name, f"the update is AdamW, use {adamw}")
        _refuse(not optim.zero_indexed_step, "optim.zero_indexed_step", False, "set it to true")
    _refuse(async_save, "checkpoint.async_save", True, "set it to false, checkpoints are written at once")
    if optim is not None:
        _check_contents(load_contents, "checkpoint.load_contents")


def _check_contents(load_contents: Sequence[str] | None, setting: str) -> None:
    missing = {"model", "optimizer", "extra"} - set(load_contents or ())
    complete = "a checkpoint is always complete, use [model,optimizer,extra]"
    _refuse(bool(missing), setting, load_contents, complete)
