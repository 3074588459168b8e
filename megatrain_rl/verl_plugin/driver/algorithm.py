"""What a run computes is asked of VERL's own functions in the driver: a name that they do not know is refused.

Without these checks an unknown name is found in the first step, minutes after the start. What those functions make of
their other settings is tried in trial.py. Functions that a user has registered with VERL are known too, if
`actor_rollout_ref.model.external_lib` names the module that does so; see names.py for others. Called by prepare.py.
"""

import importlib
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from megatrain_rl.verl_plugin.driver import trial
from megatrain_rl.verl_plugin.driver.names import ask, may_be_registered

_ACTOR = "actor_rollout_ref.actor"
_OTHERS = "use another estimator without a critic, such as grpo or rloo"
_SUMS_OF_SQUARES = ("optimal_token_baseline", "tir_optimal_token_baseline")


def check_algorithm(config: DictConfig) -> None:
    """Raise a ValueError for a name of an estimator, loss, penalty or mean that VERL does not have, or cannot run."""
    _import_users(OmegaConf.select(config, "actor_rollout_ref.model.external_lib"))
    _check_estimator(config)
    _check_losses(config)
    trial.check_estimator(config)
    trial.check_correction(config)
    trial.check_loss(config)


def _check_estimator(config: DictConfig) -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator

    setting, name = "algorithm.adv_estimator", config.algorithm.adv_estimator
    if name not in ADV_ESTIMATOR_REGISTRY and not may_be_registered(config, name):
        raise ValueError(f"{setting}={name}: VERL knows {', '.join(sorted(ADV_ESTIMATOR_REGISTRY))}")
    if name == AdvantageEstimator.REMAX and config.trainer.use_v1:
        raise ValueError(f"{setting}={name}: VERL's v1 trainer makes no greedy answers for its baseline; {_OTHERS}")
    if name in _SUMS_OF_SQUARES:
        raise ValueError(
            f"{setting}={name}: it needs {_ACTOR}.calculate_sum_pi_squared, which is not supported by strategy megatrain; "
            f"{_OTHERS}"
        )


def _check_losses(config: DictConfig) -> None:
    from verl.trainer.ppo import core_algos

    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    zeros = cast(torch.FloatTensor, torch.zeros(1, 1))

    def penalty(name: str) -> Any:
        return core_algos.kl_penalty(zeros, zeros, kl_penalty=name)

    def mean(name: str) -> Any:
        counts = {"batch_num_tokens": 1, "global_batch_size": 1, "loss_scale_factor": 1}
        return core_algos.agg_loss(zeros, torch.ones(1, 1), name, **counts)

    mode = actor.policy_loss.loss_mode
    if not may_be_registered(config, mode):
        ask(f"{_ACTOR}.policy_loss.loss_mode", mode, core_algos.get_policy_loss_fn)
    ask(f"{_ACTOR}.loss_agg_mode", actor.loss_agg_mode, mean)
    if actor.use_kl_loss:
        ask(f"{_ACTOR}.kl_loss_type", actor.kl_loss_type, penalty)
    if algorithm.use_kl_in_reward:
        ask("algorithm.kl_penalty", algorithm.kl_penalty, penalty)
        control = algorithm.kl_ctrl
        ask("algorithm.kl_ctrl.type", control.type, lambda _: core_algos.get_kl_controller(control))


def _import_users(modules: Any) -> None:
    for name in [modules] if isinstance(modules, str) else modules or ():
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"actor_rollout_ref.model.external_lib={name}: {error}") from error
