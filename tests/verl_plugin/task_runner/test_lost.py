"""What a step asked for and did not get is counted and told, or ends the run with the setting to change."""

import pytest
from omegaconf import OmegaConf

from megatrain_rl.verl_plugin.task_runner.lost import FAILED_ANSWERS, Lost, check_lengths


def config(**filter_groups):
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"n": 4}}, "algorithm": {"filter_groups": filter_groups},
            "data": {"train_batch_size": 2, "truncation": "error", "filter_overlong_prompts": False, "max_prompt_length": 5},
        }
    )  # fmt: skip


def test_failed_answers_are_counted_and_told_once(caplog):
    lost = Lost(config())
    assert lost.answers([{}] * 8, prompts=2) == 0 and not caplog.text
    assert lost.answers([{}] * 5 + [{"is_padding": True}] * 3, prompts=2) == 3
    assert lost.answers([{}] * 7, prompts=2) == 1
    assert caplog.text.count(FAILED_ANSWERS) == 1 and "3 of 8 answers" in caplog.text
    assert lost.answers([{}] * 9, prompts=2) == 0, "an agent may make several rows of one answer"


@pytest.mark.parametrize(
    "given, batches", [({"max_num_gen_batches": 3}, 3), ({"max_num_gen_batches": 0}, 100), ({}, 100)]
)
def test_groups_without_a_signal_end_the_run(given, batches):
    lost = Lost(config(enable=True, **given))
    for _ in range(2 * batches):
        lost.refill(1)
    with pytest.raises(RuntimeError, match=r"no signal.*algorithm\.filter_groups\.max_num_gen_batches"):
        lost.refill(1)
    lost.answers([{}] * 8, prompts=2)
    lost.refill(2 * batches)  # of the next step


class Rows:
    """As VERL's RLHFDataset: its filter gives back what is short enough."""

    def __init__(self, lengths):
        self.dataframe, self.filter_overlong_prompts = lengths, False

    def maybe_filter_out_long_prompts(self, rows):
        return [n for n in rows if n <= 5] if self.filter_overlong_prompts else rows


def test_truncation_error_is_an_error():
    rows = Rows([3, 6, 5, 9])
    with pytest.raises(
        ValueError, match=r"data\.truncation=error: 2 of 4 .*max_prompt_length=5.*filter_overlong_prompts"
    ):
        check_lengths(rows, config())
    assert rows.dataframe == [3, 6, 5, 9] and not rows.filter_overlong_prompts, "it is only asked"
    check_lengths(Rows([3, 5]), config())
    check_lengths(object(), config())
    for change in ({"truncation": "left"}, {"filter_overlong_prompts": True}):
        check_lengths(rows, OmegaConf.merge(config(), {"data": change}))


def test_verls_dataset_has_what_the_check_asks_for():
    from verl.utils.dataset.rl_dataset import RLHFDataset

    assert callable(RLHFDataset.maybe_filter_out_long_prompts)
