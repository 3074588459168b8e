"""The config classes that VERL builds from yaml: engine, optimizer and actor.

The engine's knobs are the fields of `StreamConfig`, taken from there, and the few below that only a run by VERL has.
The yaml files name these classes by way of targets.py, whose import registers the plug-in.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from verl.workers.config import ActorConfig, EngineConfig, FSDPOptimizerConfig, OptimizerConfig

from megatrain_rl.config import AdamWConfig, StreamConfig, check_knobs, knob
from megatrain_rl.optim.lr_schedule import KINDS, Kind, LRSchedule
from megatrain_rl.planner import usable_host_bytes

# With this as the model's `lora_adapter_path` VERL computes reference log-probs with the actor's engine
# (`disable_adapter()`), as it does for LoRA. No adapter is ever loaded. See configs/megatrain_extra and
# driver/prepare.py.
REFERENCE_MARKER = "megatrain-frozen-reference"

_STREAM_FIELDS = dataclasses.fields(StreamConfig)
# VERL's engine config with StreamConfig's fields and their descriptions. Any: a type checker cannot see a class that is
# made at run time.
_KnobFields: Any = dataclasses.make_dataclass(
    "_KnobFields",
    [(f.name, f.type, field(default=f.default, metadata=f.metadata)) for f in _STREAM_FIELDS],
    bases=(EngineConfig,),
)

_MIRRORED_BUCKET = "${oc.select:actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes,2048}"


def _derived(default: Any, help: str, **more: Any) -> Any:
    """A field that the yaml files fill in from other settings. A user who set it could only contradict these."""
    return knob(default, help, derived=True, **more)


@dataclass
class MegaTrainEngineConfig(_KnobFields):
    """VERL's engine config, extended by every field of StreamConfig and by the knobs that only a run by VERL has."""

    strategy: str = _derived("megatrain", "the strategy that VERL looks the engine up by")
    forward_only: bool = _derived(
        False,
        "whether the engine only computes log-probs, as a separate reference does: no gradients, no optimizer state",
    )
    host_reserve_gb: float = knob(
        0.0,
        "host RAM in GB left to what the run starts after the trainer (rollout engine, agent workers), at most a "
        "quarter of the machine's; unused with host_budget_gb",
        in_rl=12.0,
    )
    card_gb: float | None = knob(
        None, "GPU memory in GB that the trainer and the rollout engine may use together; null takes the whole card"
    )
    reference_for_kl_loss: bool = _derived(
        False, "whether a KL loss reads the frozen reference of this engine; follows actor.use_kl_loss"
    )
    reference_for_kl_in_reward: bool = _derived(
        False,
        "whether a KL term in the reward reads the frozen reference of this engine; follows algorithm.use_kl_in_reward",
    )
    sync_bucket_megabytes: int = _derived(
        2048,
        "bucket of VERL's weight transfer in MiB, the same as the rollout's; a larger tensor is sent from the GPU",
        in_yaml=_MIRRORED_BUCKET,
    )

    def __post_init__(self):
        super().__post_init__()
        self.stream_config()
        if self.card_gb is not None and not self.card_gb > self.gpu_budget_gb:
            raise ValueError(f"card_gb={self.card_gb}: must be more than gpu_budget_gb={self.gpu_budget_gb}, or null")
        if not self.host_reserve_gb >= 0:
            raise ValueError(f"host_reserve_gb={self.host_reserve_gb}: must not be negative")

    def stream_config(self) -> StreamConfig:
        """The knobs as a validated StreamConfig."""
        return StreamConfig(**{f.name: self[f.name] for f in _STREAM_FIELDS})

    def stream_config_here(self) -> StreamConfig:
        """The knobs with `host_budget_gb` filled in: the host RAM that this machine has now, less the reserve."""
        config = self.stream_config()
        if config.host_budget_gb is not None or not self.host_reserve_gb:
            return config
        usable = usable_host_bytes()
        reserve = min(int(self.host_reserve_gb * 1e9), usable // 4)
        return dataclasses.replace(config, host_budget_gb=(usable - reserve) / 1e9)


# The fields that the yaml of an engine may set, in the order of the files.
SETTINGS = tuple(f for f in dataclasses.fields(MegaTrainEngineConfig) if "help" in f.metadata)
# The names of those that follow from other settings.
DERIVED = tuple(f.name for f in SETTINGS if f.metadata.get("derived"))


def check_engine_settings(given: Mapping[str, Any], prefix: str) -> None:
    """Raise a ValueError if a key is none that the yaml of an engine may set. It names the nearest key that is.

    The other fields of VERL's EngineConfig (dtype, param_offload, ...) are refused on purpose: they would be ignored.
    """
    check_knobs(given, (f.name for f in SETTINGS), prefix)


def engine_config(**given: Any) -> MegaTrainEngineConfig:
    """Build the engine's config: `_target_` of configs/engine/megatrain.yaml."""
    check_engine_settings(given, prefix="megatrain.")
    return MegaTrainEngineConfig(**given)


@dataclass
class MegaTrainOptimizerConfig(OptimizerConfig):
    """AdamW and its learning-rate schedule: `_target_` of configs/optim/megatrain.yaml."""

    _mutable_fields = OptimizerConfig._mutable_fields.copy()

    eps: float = 1e-8
    lr_scheduler_type: str = "constant"
    min_lr_ratio: float = 0.0
    num_cycles: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if self.lr_scheduler_type not in KINDS:
            raise ValueError(f"optim.lr_scheduler_type={self.lr_scheduler_type!r}: must be one of {', '.join(KINDS)}")


@dataclass
class MegaTrainActorConfig(ActorConfig):
    """The actor's and the reference's config: `_target_` of configs/actor and configs/ref."""

    strategy: str = "megatrain"
    megatrain: MegaTrainEngineConfig = field(default_factory=MegaTrainEngineConfig)
    use_remove_padding: bool = False
    use_rollout_log_probs: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.engine = self.megatrain


def critic_config(**given: Any) -> NoReturn:
    """Refuse a critic: `_target_` of configs/critic/megatrain_critic.yaml.

    The file has to exist, or VERL's config would not compose.
    """
    raise ValueError(
        "critic.strategy=megatrain: critics are not supported; set algorithm.adv_estimator=grpo "
        "or another estimator without a critic"
    )


def adamw_config(optim: OptimizerConfig) -> AdamWConfig:
    """The update that VERL's optimizer config asks for.

    The files of `optim=fsdp` are understood as far as they mean AdamW; the rest is a ValueError.
    """
    eps = AdamWConfig.eps
    if isinstance(optim, MegaTrainOptimizerConfig):
        eps = optim.eps
    elif isinstance(optim, FSDPOptimizerConfig):
        overrides = dict(optim.override_optimizer_config or {})
        eps = overrides.pop("eps", eps)
        if overrides:
            raise ValueError(f"optim.override_optimizer_config={overrides}: only eps is understood; remove the rest")
    return AdamWConfig(
        lr=optim.lr,
        betas=cast(tuple[float, float], tuple(optim.betas)),  # AdamWConfig checks that there are two
        eps=eps,
        weight_decay=optim.weight_decay,
        clip_grad=optim.clip_grad,
    )


def lr_schedule(optim: OptimizerConfig) -> LRSchedule:
    """The schedule VERL's optimizer config asks for: explicit warm-up steps first, else the ratio of all steps."""
    total_steps = max(0, optim.total_training_steps)
    warmup_steps = optim.lr_warmup_steps
    if warmup_steps is None or warmup_steps <= 0:
        warmup_steps = int(optim.lr_warmup_steps_ratio * total_steps)
    if not isinstance(optim, (MegaTrainOptimizerConfig, FSDPOptimizerConfig)):
        return LRSchedule(warmup_steps=warmup_steps, total_steps=total_steps)
    return LRSchedule(
        kind=cast(Kind, optim.lr_scheduler_type),  # LRSchedule checks it
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        min_lr_ratio=optim.min_lr_ratio or 0.0,
        num_cycles=optim.num_cycles,
    )
