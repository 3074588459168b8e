"""What becomes of the settings that VERL has for its own engines, in a run of ours. No key is ignored in silence.

For each part of VERL's config: the settings that are honoured (by this package, or by VERL around it), those that are
refused unless they have one of the values that this engine is the same for, and those without effect here, of which a
value other than VERL's own is told once. Tests walk through VERL's config classes and through the whole config of a
run, so a new key of VERL's has to be put here. Used by supported.py.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import ListConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of VERL's config. A key is a dotted path below it; one that ends in a dot stands for all keys below it.

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
        "strategy", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_infer_micro_batch_size_per_gpu",
        "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu", "clip_ratio", "clip_ratio_low",
        "clip_ratio_high", "policy_loss", "clip_ratio_c", "loss_agg_mode", "loss_scale_factor", "entropy_coeff", "tau_pos", "tau_neg",
        "calculate_entropy", "calculate_sum_pi_squared", "use_kl_loss", "use_prefix_grouper", "kl_loss_coef", "kl_loss_type",
        "ppo_epochs", "shuffle", "data_loader_seed", "checkpoint", "optim", "profiler", "engine", "rollout_n", "model_config",
        "global_batch_info", "qat", "ulysses_sequence_parallel_size", "fsdp_config", "use_rollout_log_probs", "router_replay",
    ),
    refused={
        "freeze_vision_tower": ((False,), "set it to false, text models have none"),
        "ppo_micro_batch_size": ((None,), "set ppo_micro_batch_size_per_gpu instead"),
    },
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

_ROLES = "actor_rollout_ref"
_REWARD = "VERL's main does not read it, set the same below reward instead"
_ONE_GPU = "set it to 1, one GPU generates"
_PER_GPU = "set log_prob_micro_batch_size_per_gpu instead"

# VERL's whole config of an RL run, less the parts above. A longer key goes before a shorter one.
RUN = Part(
    honoured=(
        "model_engine", f"{_ROLES}.actor.optim.", f"{_ROLES}.actor.megatrain.", f"{_ROLES}.ref.", f"{_ROLES}.rollout.", f"{_ROLES}.nccl_timeout",
        "data.", "reward.", "algorithm.", "transfer_queue.", "trainer.", "global_profiler.", "skip.", "ray_kwargs.",
    ),
    refused={
        # keys of older versions of VERL
        "custom_reward_function.": ((None,), _REWARD), "reward_model.": ((None,), _REWARD), "sandbox_fusion.": ((None,), _REWARD),
        "data.tokenizer": ((None,), f"set {_ROLES}.model.tokenizer_path"),
        f"{_ROLES}.rollout.log_prob_micro_batch_size": ((None,), _PER_GPU),
        f"{_ROLES}.ref.log_prob_micro_batch_size": ((None,), _PER_GPU),
        # what VERL's processes refuse minutes after the start
        f"{_ROLES}.rollout.mode": (("async",), "set it to async"),
        f"{_ROLES}.rollout.tensor_model_parallel_size": ((1,), _ONE_GPU), f"{_ROLES}.rollout.data_parallel_size": ((1,), _ONE_GPU),
        f"{_ROLES}.rollout.pipeline_model_parallel_size": ((1,), _ONE_GPU),
        f"{_ROLES}.hybrid_engine": ((True,), "set it to true, trainer and rollout engine share the GPU"),
        # what would change what is trained, or what is kept
        f"{_ROLES}.actor.optim.optimizer": (("AdamW",), "the update is AdamW"),
        f"{_ROLES}.actor.optim.optimizer_impl": (("torch.optim",), "the update is that of torch.optim.AdamW"),
        f"{_ROLES}.actor.optim.zero_indexed_step": ((True,), "set it to true"),
        "critic.enable": ((None, False), "critics are missing, set it to false"),
        "algorithm.use_pf_ppo": ((False,), "VERL reads it with a critic only, set it to false"),
        "trainer.critic_warmup": ((0,), "there is no critic, and until that step nothing would be trained; set it to 0"),
        "trainer.del_local_ckpt_after_load": ((False,), "checkpoints stay, set it to false"),
        "global_profiler.tool": ((None, "nsys", "npu", "torch", "torch_memory"), "it looks for a resident torch module"),
        "distillation.enabled": ((False,), "set it to false"),
    },
    no_effect={
        "critic.": None, "distillation.": None, "algorithm.pf_ppo.": None, "trainer.max_critic_ckpt_to_keep": None,
        f"{_ROLES}.ref.fsdp_config.": None, f"{_ROLES}.rollout.layered_summon": (False,),
        **{f"{_ROLES}.ref.{key}": values for key, values in {**_PADDING, **_HEAD}.items() if key != "pad_to_length_bucket"},
    },
)  # fmt: skip

_told: set[str] = set()
_ABSENT = object()


def check(part: Part, given: Any, prefix: str) -> None:
    """Raise a ValueError for a value that would be ignored and changes what is trained; tell one without effect, once.

    given: the part of the config as a mapping or as VERL's object; keys that it lacks were not asked for.
    """
    for key, (fine, instead) in part.refused.items():
        for name, value in _values(given, key):
            if value not in fine:
                raise ValueError(f"{prefix}{name}={value}: not supported by strategy megatrain; {instead}")
    for key, neutral in part.no_effect.items():
        for name, value in _values(given, key) if neutral is not None else ():
            if value not in (neutral or ()) and f"{prefix}{name}" not in _told:
                _told.add(f"{prefix}{name}")
                log.warning("%s%s=%s has no effect with strategy megatrain", prefix, name, value)


def _values(given: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The name and value of `key`, or of every key below it if it ends in a dot; nothing if it is not there."""
    value = given
    for name in key.rstrip(".").split("."):
        if value is None:
            return  # there is nothing below
        value = value.get(name, _ABSENT) if isinstance(value, Mapping) else getattr(value, name, _ABSENT)
        if value is _ABSENT:
            return
    if not key.endswith("."):
        yield (
            key,
            list(value) if isinstance(value, ListConfig) else dict(value) if isinstance(value, Mapping) else value,
        )
    elif isinstance(value, Mapping):
        for name in value:
            below = f"{key}{name}"
            yield from _values(given, f"{below}." if isinstance(value.get(name), Mapping) else below)
