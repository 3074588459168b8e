"""What a step asked for and did not get: answers that failed, prompts without a signal, prompts that are too long.

VERL goes on with what is left: groups get smaller, and a row of padding stands for a missing one. Used by trainer.py.
"""

import copy
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

log = logging.getLogger(__name__)

FAILED_ANSWERS = "megatrain/failed_answers"
LONE_ANSWERS = "megatrain/lone_answers"
FAILED_VAL_ANSWERS = "megatrain/failed_val_answers"
# VERL's count of prompts that it replaced, with all their answers, since one answer had failed.
EVICTED_PROMPTS = "training/rollout_failure/evicted_samples"
# Batches of prompts that one step may ask for when groups without a signal are left out and no limit is set.
_MOST_BATCHES = 100


class Lost:
    """Counts what is lost, for the run of `config`."""

    def __init__(self, config: DictConfig):
        self._config = config
        self._told = False
        self._refilled = 0

    def answers(self, keys: list[str], tags: list[dict[str, Any]], prompts: int) -> dict[str, int]:
        """Metrics: how many of a sample's answers failed, and how many are the only one left to their prompt.

        keys, tags: VERL's of each row. A key is `{prompt}_{answer}_{row}`: an agent may make several rows of an
        answer. prompts: how many the sample asked for, with those that were replaced.
        """
        self._refilled = 0
        n = self._config.actor_rollout_ref.rollout.n
        rows = zip(keys, tags, strict=True)
        there = {key.rsplit("_", 1)[0] for key, tag in rows if not tag.get("is_padding", False)}
        failed = max(0, prompts * n - len(there))
        left = Counter(answer.rsplit("_", 1)[0] for answer in there).values()
        lone = sum(count == 1 for count in left) if n > 1 else 0
        if failed and not self._told:
            self._told = True
            log.warning(
                "%d of %d answers of a step are missing: the reward function raised, or the rollout engine refused the request (the "
                "first error stands above). Their groups are smaller, and the advantage of an answer that is left alone is its whole "
                "reward. %s and %s count them in each step",
                failed, prompts * n, FAILED_ANSWERS, LONE_ANSWERS,
            )  # fmt: skip
        return {FAILED_ANSWERS: failed, LONE_ANSWERS: lone}

    def validation(self, asked: Mapping[Any, int] | None, got: int) -> dict[str, int]:
        """A metric: how many answers of a validation failed. asked: of each prompt; got: answers that have a reward."""
        failed = max(0, sum((asked or {}).values()) - got)
        if failed:
            log.warning(
                "%d of %d answers of a validation are missing; the mean reward is that of the rest",
                failed, failed + got,
            )  # fmt: skip
        return {FAILED_VAL_ANSWERS: failed}

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


def check_lengths(dataset: Any, config: DictConfig, setting: str) -> None:
    """A ValueError if a prompt is longer than rollouts take and `data.truncation` does not ask to cut it on the left.

    VERL's rollouts cut such a prompt on the left, whatever the setting says. dataset: VERL's; one of the user's own is
    left alone. setting: where its files stand.
    """
    data, limit = config.data, config.actor_rollout_ref.rollout.prompt_length
    own = not hasattr(dataset, "maybe_filter_out_long_prompts") or not hasattr(dataset, "dataframe")
    filtered = data.filter_overlong_prompts and data.max_prompt_length <= limit
    if own or filtered or data.truncation == "left":
        return
    filtering = copy.copy(dataset)
    filtering.filter_overlong_prompts, filtering.max_prompt_length = True, limit
    rows, short = len(dataset.dataframe), len(filtering.maybe_filter_out_long_prompts(dataset.dataframe))
    if short < rows:
        raise ValueError(
            f"data.truncation={data.truncation}: {rows - short} of {rows} prompts of {setting} are longer than {limit} tokens "
            "(actor_rollout_ref.rollout.prompt_length, which follows data.max_prompt_length), or are refused by the chat template "
            "(its error then stands above); raise it, set data.filter_overlong_prompts=true to leave them out, or "
            "data.truncation=left to cut them"
        )


def check_rows(train: Any, validation: Any, config: DictConfig) -> None:
    """A ValueError if VERL's filter has left less than a batch, or nothing to validate with. None: not read yet."""
    data = config.data
    for dataset, setting, needed in (
        (train, "data.train_files", data.train_batch_size),
        (validation, "data.val_files", 1),
    ):
        if dataset is not None and hasattr(dataset, "__len__") and len(dataset) < needed:
            raise ValueError(
                f"{setting}: {len(dataset)} prompts are left, and {needed} are needed (data.train_batch_size, or one to "
                f"validate with). data.filter_overlong_prompts={data.filter_overlong_prompts} leaves out those that have more than "
                f"data.max_prompt_length={data.max_prompt_length} tokens or that the chat template refuses: raise "
                "data.max_prompt_length, lower data.train_batch_size, or add data"
            )
