"""Reference log-probs from the actor's engine when all parameters are trained, on the default model_engine.

Symptom: with actor.strategy=megatrain and a KL term VERL builds a second engine for the reference in the same process.
Cause: VERL asks the actor for reference log-probs only if LoRA is configured (rank > 0, or lora_adapter_path not null);
    it works that out from the config in six places.
Upstream: verl 0.9.1, main_ppo_v0.py:47, ppo/ray_trainer.py:360, ppo/v1/trainer_base.py:237 and :799, and experimental/.
    No issue known.
Remove when: an engine can say that it also serves as the reference.

VERL's mains call `validate_config` in the driver before anything is built, so it is wrapped to set the key that all six
places read. model_engine=megatrain sets the same key in its yaml (configs/megatrain_extra) and is left alone here: there
null is the user's wish for a separate reference.
"""

import functools
from types import ModuleType

MODULE = "verl.utils.config"


def apply(module: ModuleType) -> None:
    validate = module.validate_config

    @functools.wraps(validate)
    def validate_config(config, *args, **kwargs) -> None:
        mark(config)
        validate(config, *args, **kwargs)

    module.validate_config = validate_config


def mark(config) -> None:
    """Set the key iff actor and reference are ours, a KL term needs the reference, and no knobs node says otherwise."""
    from omegaconf import OmegaConf, open_dict
    from verl.trainer.ppo.utils import need_reference_policy

    roles = config.actor_rollout_ref
    ours = roles.actor.strategy == roles.ref.strategy == "megatrain"
    if not ours or not need_reference_policy(config) or OmegaConf.select(roles, "actor.megatrain") is not None:
        return
    from megatrain_rl.verl_plugin.config import REFERENCE_MARKER

    if roles.model.lora_adapter_path is None:
        with open_dict(roles.model):
            roles.model.lora_adapter_path = REFERENCE_MARKER
