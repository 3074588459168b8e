"""What VERL's yaml builds: engine, optimizer and actor configs. The knobs are `StreamConfig`'s fields, taken from it.

configs/ names the classes and functions here as `_target_`, so building a config imports this module in the driver and
in the worker; that registers the plug-in even where entry points are switched off.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from verl.workers.config import ActorConfig, EngineConfig, FSDPOptimizerConfig, OptimizerConfig

from megatrain_rl.config import AdamWConfig, StreamConfig, check_knobs
from megatrain_rl.optim.lr_schedule import KINDS, LRSchedule
from megatrain_rl.planner import usable_host_bytes
from megatrain_rl.verl_plugin import register

register.install()

# A model config whose `lora_adapter_path` is this makes VERL compute reference log-probs with the actor's engine
# (`disable_adapter()`), as it does for LoRA; no adapter is ever loaded. See configs/megatrain_extra and verl_patches.
REFERENCE_MARKER = "megatrain-frozen-reference"

_STREAM_FIELDS = [(f.name, f.type, field(default=f.default)) for f in dataclasses.fields(StreamConfig)]
_KnobFields = dataclasses.make_dataclass("_KnobFields", _STREAM_FIELDS, bases=(EngineConfig,))


@dataclass
class MegaTrainEngineConfig(_KnobFields):
    """VERL's engine config plus every field of StreamConfig.

    reference_for_kl_loss, reference_for_kl_in_reward: a KL term reads reference log-probs, so the engine that also
        serves as the reference keeps the frozen weights. The yaml takes both from VERL's own switches.
    sync_bucket_megabytes: bucket of VERL's weight transfer; a larger tensor has to be sent from the GPU.
    host_reserve_gb: host RAM in GB left to what the run starts after the trainer (rollout engine, agent workers), at most a quarter
        of what there is; not used when host_budget_gb is set.
    card_gb: GPU memory in GB (1e9 bytes) that trainer and rollout engine may use together; None: the whole card. See gpu_share.py.
    """

    strategy: str = "megatrain"
    reference_for_kl_loss: bool = False
    reference_for_kl_in_reward: bool = False
    sync_bucket_megabytes: int = 2048
    card_gb: float | None = None
    host_reserve_gb: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        self.stream_config()
        if self.card_gb is not None and not self.card_gb > self.gpu_budget_gb:
            raise ValueError(f"card_gb={self.card_gb}: must be more than gpu_budget_gb={self.gpu_budget_gb}, or null")
        if not self.host_reserve_gb >= 0:
            raise ValueError(f"host_reserve_gb={self.host_reserve_gb}: must not be negative")

    def stream_config(self) -> StreamConfig:
        """The knobs, validated."""
        return StreamConfig(**{name: self[name] for name, _, _ in _STREAM_FIELDS})

    def stream_config_here(self) -> StreamConfig:
        """The knobs with a host budget in numbers: what this machine has now, without the reserve."""
        config = self.stream_config()
        if config.host_budget_gb is not None or not self.host_reserve_gb:
            return config
        usable = usable_host_bytes()
        reserve = min(int(self.host_reserve_gb * 1e9), usable // 4)
        return dataclasses.replace(config, host_budget_gb=(usable - reserve) / 1e9)


_Settings = dataclasses.make_dataclass(
    "_Settings",
    [
        *_STREAM_FIELDS,
        ("strategy", str, "megatrain"),
        ("forward_only", bool, False),
        ("reference_for_kl_loss", bool, False),
        ("reference_for_kl_in_reward", bool, False),
        ("sync_bucket_megabytes", int, 2048),
        ("card_gb", float | None, None),
        ("host_reserve_gb", float, 0.0),
    ],
)


def check_engine_settings(given: Mapping[str, Any], prefix: str) -> None:
    """Raise a ValueError for the first key that no yaml of an engine may set, naming the nearest one that it may.

    The rest of VERL's EngineConfig (dtype, param_offload, ...) is refused on purpose: it would be ignored.
    """
    check_knobs(given, _Settings, prefix)


def engine_config(**given: Any) -> MegaTrainEngineConfig:
    """`_target_` of configs/engine/megatrain.yaml."""
    check_engine_settings(given, prefix="megatrain.")
    return MegaTrainEngineConfig(**given)


@dataclass
class MegaTrainOptimizerConfig(OptimizerConfig):
    """AdamW and its schedule: `_target_` of configs/optim/megatrain.yaml."""

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
    """`_target_` of the actor and of the reference."""

    strategy: str = "megatrain"
    megatrain: MegaTrainEngineConfig = field(default_factory=MegaTrainEngineConfig)
    use_remove_padding: bool = False
    use_rollout_log_probs: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.engine = self.megatrain


def critic_config(**given: Any) -> NoReturn:
    """`_target_` of configs/critic/megatrain_critic.yaml, which has to exist for VERL's config to compose."""
    raise ValueError(
        "critic.strategy=megatrain: critics are not supported; set algorithm.adv_estimator=grpo "
        "or another estimator without a critic"
    )


def adamw_config(optim: OptimizerConfig) -> AdamWConfig:
    """The update VERL's optimizer config asks for; `optim=fsdp` files are understood as far as they mean AdamW."""
    eps = AdamWConfig.eps
    if isinstance(optim, MegaTrainOptimizerConfig):
        eps = optim.eps
    elif isinstance(optim, FSDPOptimizerConfig):
        overrides = dict(optim.override_optimizer_config or {})
        eps = overrides.pop("eps", eps)
        if overrides:
            raise ValueError(f"optim.override_optimizer_config={overrides}: only eps is understood; remove the rest")
    return AdamWConfig(
        lr=optim.lr, betas=tuple(optim.betas), eps=eps, weight_decay=optim.weight_decay, clip_grad=optim.clip_grad
    )


def lr_schedule(optim: OptimizerConfig) -> LRSchedule:
    """The schedule VERL's optimizer config asks for: explicit warm-up steps first, else the ratio of all steps."""
    total_steps = max(0, optim.total_training_steps)
    warmup_steps = optim.lr_warmup_steps
    if warmup_steps is None or warmup_steps <= 0:
        warmup_steps = int(optim.lr_warmup_steps_ratio * total_steps)
    if not isinstance(optim, (MegaTrainOptimizerConfig, FSDPOptimizerConfig)):
        return LRSchedule(base_lr=optim.lr, warmup_steps=warmup_steps, total_steps=total_steps)
    return LRSchedule(
        base_lr=optim.lr,
        kind=optim.lr_scheduler_type,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        min_lr_ratio=optim.min_lr_ratio or 0.0,
        num_cycles=optim.num_cycles,
    )
