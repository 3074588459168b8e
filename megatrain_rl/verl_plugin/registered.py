"""Is a function of VERL's registries VERL's own? A user's may be registered under the same name."""

from collections.abc import Callable

from verl.trainer.ppo import core_algos


def is_verls_own(function: Callable) -> bool:
    """Whether an advantage estimator or a policy loss was written in VERL's own module.

    A decorator may have copied the names of VERL's function to a user's. Where it was written stays with it.
    """
    return getattr(function, "__globals__", None) is vars(core_algos)
