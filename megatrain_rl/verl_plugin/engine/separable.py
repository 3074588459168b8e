"""Whether a loss of VERL's is separable: the losses of the packs add up to the mini-batch's, however packs are cut.

A separable loss divides by counts of the whole mini-batch and reads no row beside its own. tests/verl_plugin/engine/
test_losses.py tries every loss that VERL registers. A loss that is not listed here, a user's own for example, counts
as not separable: it is right all the same, at the price of one more forward. Called by loss.py.
"""

import functools
from collections.abc import Callable

from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss, sft_loss

from megatrain_rl.verl_plugin.registered import is_verls_own

# `clip_cov` and `kl_cov` pick tokens among all that they see, and `geo_mean` divides by the rows that it sees.
_SEPARABLE_MODES = frozenset({"vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo", "bypass_mode"})


def is_separable(loss_function: Callable) -> bool:
    function, config = unbound(loss_function)
    if function is sft_loss:
        return True
    return function is ppo_loss and isinstance(config, ActorConfig) and _is_separable_mode(config)


def describe(loss_function: Callable) -> str:
    """The loss as a user names it."""
    function, config = unbound(loss_function)
    if function is ppo_loss and isinstance(config, ActorConfig):
        return f"actor_rollout_ref.actor.policy_loss.loss_mode={config.policy_loss.get('loss_mode', 'vanilla')}"
    return f"loss function {getattr(function, '__qualname__', function)}"


def unbound(loss_function: Callable | None) -> tuple[Callable | None, object]:
    """The function that VERL's worker has bound to its config, and that config; a function of another form and None."""
    if not isinstance(loss_function, functools.partial):
        return loss_function, None
    config = loss_function.args[0] if loss_function.args else loss_function.keywords.get("config")
    return loss_function.func, config


def _is_separable_mode(config: ActorConfig) -> bool:
    mode = config.policy_loss.get("loss_mode", "vanilla")
    if not is_verls_own(core_algos.get_policy_loss_fn(mode)):
        return False
    return mode in _SEPARABLE_MODES and not (mode == "bypass_mode" and _weighs_by_the_batch(config))


def _weighs_by_the_batch(config: ActorConfig) -> bool:
    """Whether bypass mode divides its importance weights by their mean over the rows that it sees."""
    correction = config.policy_loss.get("rollout_correction") or {}
    weighs = correction.get("loss_type") == "reinforce" and correction.get("rollout_is") is not None
    return weighs and bool(correction.get("rollout_is_batch_normalize"))
