"""What a step asked for and did not get: answers that failed, prompts without a signal, prompts that are too long.

VERL goes on with what is left: groups get smaller, and a row of padding stands for a missing one. Used by trainer.py.
"""

import copy
import logging
from typing import Any

from omegaconf import DictConfig

log = logging.getLogger(__name__)

FAILED_ANSWERS = "megatrain/failed_answers"
# Batches of prompts that one step may ask for when groups without a signal are left out and no limit is set.
_MOST_BATCHES = 100


class Lost:
    """Counts what is lost, for the run of `config`."""

    def __init__(self, config: DictConfig):
        self._config = config
        self._told = False
        self._refilled = 0

    def answers(self, tags: list[dict[str, Any]], prompts: int) -> int:
        """How many of a sample's answers failed. tags: VERL's of each row; prompts: how many the sample asked for."""
        self._refilled = 0
        asked = prompts * self._config.actor_rollout_ref.rollout.n
        failed = max(0, asked - sum(not tag.get("is_padding", False) for tag in tags))
        if failed and not self._told:
            self._told = True
            log.warning(
                "%d of %d answers of a step are missing: the reward function raised, or the rollout engine refused the request (the "
                "first error stands above). Their groups are smaller, and a group of one has no baseline. %s counts them in each step",
                failed, asked, FAILED_ANSWERS,
            )  # fmt: skip
        return failed

    def refill(self, prompts: int) -> None:
        """Note that more prompts are asked for; a RuntimeError when one step has asked for too many."""
        self._refilled += prompts
        filter_groups, batch = self._config.algorithm.get("filter_groups") or {}, self._config.data.train_batch_size
        limit = filter_groups.get("max_num_gen_batches", 0)
        limit = limit if limit and limit > 0 else _MOST_BATCHES
        if self._refilled > limit * batch:
            raise RuntimeError(
                f"{self._refilled} more prompts were asked for in one step, more than {limit} batches of {batch}, and their groups had "
                "no signal: all answers to a prompt got the same reward, or failed. Look at the reward function, take data of "
                "another difficulty, raise algorithm.filter_groups.max_num_gen_batches, or set algorithm.filter_groups.enable=false"
            )


def check_lengths(dataset: Any, config: DictConfig) -> None:
    """A ValueError if a prompt is longer than rollouts take and `data.truncation=error` asks for one.

    VERL's rollouts cut such a prompt on the left, whatever the setting says. dataset: VERL's; one of the user's own is
    left alone.
    """
    data = config.data
    own = not hasattr(dataset, "maybe_filter_out_long_prompts") or not hasattr(dataset, "dataframe")
    if own or data.truncation != "error" or data.filter_overlong_prompts:
        return
    filtering = copy.copy(dataset)
    filtering.filter_overlong_prompts = True
    rows, short = len(dataset.dataframe), len(filtering.maybe_filter_out_long_prompts(dataset.dataframe))
    if short < rows:
        raise ValueError(
            f"data.truncation=error: {rows - short} of {rows} prompts are longer than data.max_prompt_length={data.max_prompt_length} "
            "tokens; raise it, set data.filter_overlong_prompts=true to leave them out, or data.truncation=left to cut them"
        )
