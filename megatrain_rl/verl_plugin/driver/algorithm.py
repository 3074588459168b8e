"""What a run computes is asked of VERL's own functions in the driver: a name that they do not know is refused.

Without these checks an unknown name is found in the first step, minutes after the start. What those functions make of
their other settings is tried in trial.py. Functions that a user has
registered with VERL are known too, if `actor_rollout_ref.model.external_lib` names the module that does so. Called by
prepare.py.
"""

import importlib
from collections.abc import Callable
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from megatrain_rl.verl_plugin.driver import trial

_ACTOR = "actor_rollout_ref.actor"
_SUMS_OF_SQUARES = ("optimal_token_baseline", "tir_optimal_token_baseline")


def check_algorithm(config: DictConfig) -> None:
    """Raise a ValueError for a name of an estimator, loss, penalty or mean that VERL does not have, or cannot run."""
    from verl.trainer.ppo import core_algos

    _import_users(OmegaConf.select(config, "actor_rollout_ref.model.external_lib"))
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    known = sorted(core_algos.ADV_ESTIMATOR_REGISTRY)
    if algorithm.adv_estimator not in core_algos.ADV_ESTIMATOR_REGISTRY:
        raise ValueError(f"algorithm.adv_estimator={algorithm.adv_estimator}: VERL knows {', '.join(known)}")
    if algorithm.adv_estimator == core_algos.AdvantageEstimator.REMAX and config.trainer.use_v1:
        raise ValueError(
            "algorithm.adv_estimator=remax: VERL's v1 trainer makes no greedy answers for its baseline; use another "
            "estimator without a critic, such as grpo or rloo"
        )
    if algorithm.adv_estimator in _SUMS_OF_SQUARES:
        raise ValueError(
            f"algorithm.adv_estimator={algorithm.adv_estimator}: it needs {_ACTOR}.calculate_sum_pi_squared, which is "
            "not supported by strategy megatrain; use another estimator without a critic, such as grpo or rloo"
        )
    zeros = cast(torch.FloatTensor, torch.zeros(1, 1))

    def penalty(name: str) -> Any:
        return core_algos.kl_penalty(zeros, zeros, kl_penalty=name)

    def mean(name: str) -> Any:
        counts = {"batch_num_tokens": 1, "global_batch_size": 1, "loss_scale_factor": 1}
        return core_algos.agg_loss(zeros, torch.ones(1, 1), name, **counts)

    _ask(f"{_ACTOR}.policy_loss.loss_mode", actor.policy_loss.loss_mode, core_algos.get_policy_loss_fn)
    _ask(f"{_ACTOR}.loss_agg_mode", actor.loss_agg_mode, mean)
    if actor.use_kl_loss:
        _ask(f"{_ACTOR}.kl_loss_type", actor.kl_loss_type, penalty)
    if algorithm.use_kl_in_reward:
        _ask("algorithm.kl_penalty", algorithm.kl_penalty, penalty)
    trial.check_estimator(config)
    trial.check_correction(config)
    trial.check_loss(config)


def _ask(setting: str, name: str, use: Callable[[str], Any]) -> None:
    """Use `name` as VERL will; an error of VERL's becomes one that names the setting."""
    try:
        use(name)
    except (ValueError, NotImplementedError, KeyError) as error:
        said = f": {error}" if str(error) else ""
        raise ValueError(f"{setting}={name}: VERL does not know it{said}") from error


def _import_users(modules: Any) -> None:
    for name in [modules] if isinstance(modules, str) else modules or ():
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"actor_rollout_ref.model.external_lib={name}: {error}") from error
