"""What becomes of the settings that VERL has for its own engines, in a run of ours. No key is ignored in silence.

For each part of VERL's config: the settings that are honoured (by this package, or by VERL around it), those that are
refused unless they have one of the values that this engine is the same for, and those without effect here, of which a
value other than VERL's own is told once. A test walks through VERL's config classes, so a new key of VERL's has to be
put here. Used by supported.py.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of VERL's config.

    refused: values that are fine, and what to do instead of another, by key. no_effect: VERL's own values, by key; None
    for a key of several, of which none is looked at.
    """

    honoured: tuple[str, ...]
    refused: Mapping[str, tuple[tuple[Any, ...], str]]
    no_effect: Mapping[str, tuple[Any, ...] | None]


_PADDING = {"use_remove_padding": (True, False), "pad_to_length": (False,), "pad_to_length_bucket": (1024,)}
_HEAD = {
    "entropy_from_logits_with_chunking": (False,), "entropy_from_logits_chunk_size": (2048,), "entropy_checkpointing": (False,),
    "use_fused_kernels": (False,), "use_torch_compile": (True,),
}  # fmt: skip
_MEGATRAIN = "select it with model_engine=megatrain"

# VERL's FSDPEngineConfig, of a run that has strategy=megatrain on VERL's default model engine.
ENGINE = Part(
    honoured=(
        "strategy", "forward_only", "use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "infer_max_token_len_per_gpu",
        "infer_micro_batch_size_per_gpu", "router_replay", "ulysses_sequence_parallel_size", "qat",
    ),
    refused={
        "dtype": (("bfloat16",), f"{_MEGATRAIN} and set actor_rollout_ref.actor.megatrain.param_dtype"),
        "mixed_precision": ((None,), f"{_MEGATRAIN} and set actor_rollout_ref.actor.megatrain.param_dtype and grad_dtype"),
        "full_determinism": ((False,), "set it to false; the trainer's own sums have a fixed order, its GPU kernels may not"),
    },
    no_effect={
        "param_offload": (False,), "optimizer_offload": (False,), "offload_policy": (False,), "reshard_after_forward": (True,),
        "fsdp_size": (-1,), "forward_prefetch": (False,), "model_dtype": ("fp32",), "use_orig_params": (False,), "seed": (42,),
        "use_no_sync_for_gradient_accumulation": (True, False), "wrap_policy": ({}, {"min_num_params": 0}), "turbo_config": None,
        **_PADDING, **_HEAD,
    },
)  # fmt: skip

# VERL's FSDPActorConfig. Most of it is read by VERL's loss and by VERL's worker.
ACTOR = Part(
    honoured=(
        "strategy", "ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_infer_micro_batch_size_per_gpu",
        "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu", "clip_ratio", "clip_ratio_low",
        "clip_ratio_high", "policy_loss", "clip_ratio_c", "loss_agg_mode", "loss_scale_factor", "entropy_coeff", "tau_pos", "tau_neg",
        "calculate_entropy", "calculate_sum_pi_squared", "use_kl_loss", "use_prefix_grouper", "kl_loss_coef", "kl_loss_type",
        "ppo_epochs", "shuffle", "data_loader_seed", "checkpoint", "optim", "profiler", "engine", "rollout_n", "model_config",
        "global_batch_info", "qat", "ulysses_sequence_parallel_size", "fsdp_config", "use_rollout_log_probs", "router_replay",
    ),
    refused={"freeze_vision_tower": ((False,), "set it to false, text models have none")},
    no_effect={"grad_clip": (1.0,), **_PADDING, **_HEAD},
)  # fmt: skip

# VERL's HFModelConfig.
MODEL = Part(
    honoured=(
        "path", "local_path", "hf_config_path", "local_hf_config_path", "tokenizer_path", "local_tokenizer_path", "model_type",
        "load_tokenizer", "hf_config", "generation_config", "tokenizer", "processor", "use_shm", "trust_remote_code",
        "custom_chat_template", "external_lib", "override_config", "lora_rank", "lora", "lora_adapter_path", "architectures", "mtp",
    ),
    refused={},
    no_effect={
        "enable_gradient_checkpointing": (True,), "enable_activation_offload": (False,), "use_liger": (False,),
        "fused_kernel_options": None, "tiled_mlp": None, "target_modules": ("all-linear",), "exclude_modules": (None,),
        "target_parameters": (None,), "lora_alpha": (16, 32), "use_remove_padding": (True, False), "use_fused_kernels": (False,),
    },
)  # fmt: skip

# VERL's CheckpointConfig.
CHECKPOINT = Part(
    honoured=("load_contents", "async_save"),
    refused={},
    no_effect={
        "save_contents": (["model", "optimizer", "extra"], ["model", "optimizer", "extra", "hf_model"]), "strict": (True,),
        "save_lora_only": (False,),
    },
)  # fmt: skip

_told: set[str] = set()


def check(part: Part, given: Any, prefix: str) -> None:
    """Raise a ValueError for a value that would be ignored and changes what is trained; tell one without effect, once.

    given: the part of the config as a mapping or as VERL's object; keys that it lacks were not asked for.
    """
    for key, (fine, instead) in part.refused.items():
        value = _value(given, key, default=fine[0])
        if value not in fine:
            raise ValueError(f"{prefix}{key}={value}: not supported by strategy megatrain; {instead}")
    for key, neutral in part.no_effect.items():
        if neutral is None:
            continue
        value = _value(given, key, default=neutral[0])
        if value not in neutral and f"{prefix}{key}" not in _told:
            _told.add(f"{prefix}{key}")
            log.warning("%s%s=%s has no effect with strategy megatrain", prefix, key, value)


def _value(given: Any, key: str, default: Any) -> Any:
    value = given.get(key, default) if isinstance(given, Mapping) else getattr(given, key, default)
    return list(value) if type(value).__name__ == "ListConfig" else dict(value) if isinstance(value, Mapping) else value
