"""A reward that is no finite number is an error of the reward function, told as one.

Symptom: one NaN makes the loss of a whole step NaN, and the step changes nothing; None, a text or a dict without
    `score` ends in an error of another place, which names no reward.
Cause: what the reward function returned is put into a tensor as it is, and None stands for a reward that comes later.
Upstream: verl 0.9.1, experimental/reward_loop/reward_loop.py:145, experimental/agent_loop/agent_loop.py:144. No issue
    known.
Remove when: VERL looks at what a reward function returns.

The answer fails then like one whose reward function has raised: VERL goes on without it, and our trainer counts it.
"""

import math
from types import ModuleType
from typing import Any

from verl_patches.ours import is_ours
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.experimental.reward_loop.reward_loop"
VERSIONS = {"verl": TESTED_VERL}


def apply(module: ModuleType) -> None:
    async def compute_score(compute, self, *args, **kwargs):
        if not is_ours(self.config):
            return await compute(self, *args, **kwargs)
        try:
            result = await compute(self, *args, **kwargs)
        except KeyError as error:
            if error.args != ("score",):
                raise
            raise ValueError("the reward function returned a dict without `score`") from error
        return {**result, "reward_score": _number(result["reward_score"])}

    wrap(module.RewardLoopWorker, "compute_score", compute_score, patch=__name__)


def _number(score: Any) -> float:
    """The reward as a float. Numbers of numpy and torch are fine."""
    try:
        value = math.nan if isinstance(score, str) else float(score)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(
            f"the reward function returned {score!r}, and a reward is a finite number, or a dict that has one as `score` "
            "(reward.custom_reward_function)"
        )
    return value
