"""What a step asked for and did not get is counted and told, or ends the run with the setting to change."""

import inspect

import pytest
from omegaconf import OmegaConf

from megatrain_rl.verl_plugin.task_runner.lost import (
    FAILED_ANSWERS,
    FAILED_VAL_ANSWERS,
    LONE_ANSWERS,
    Lost,
    check_lengths,
    check_rows,
)


def config(**filter_groups):
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"n": 4}}, "algorithm": {"filter_groups": filter_groups},
            "data": {"train_batch_size": 2, "truncation": "error", "filter_overlong_prompts": False, "max_prompt_length": 5},
        }
    )  # fmt: skip


def answers(*groups: int, rows: int = 1, padding: int = 0) -> dict:
    """The rows of a sample: so many answers to each prompt, each of so many rows, and rows of padding."""
    keys = [f"uid{g}_{i}_{row}" for g, n in enumerate(groups) for i in range(n) for row in range(rows)]
    tags = [{}] * len(keys) + [{"is_padding": True}] * padding
    return {"keys": keys + [f"pad_{i}_0" for i in range(padding)], "tags": tags, "prompts": 2}


def test_failed_answers_are_counted_and_told_once(caplog):
    lost = Lost(config())
    assert lost.answers(**answers(4, 4)) == {FAILED_ANSWERS: 0, LONE_ANSWERS: 0} and not caplog.text
    assert lost.answers(**answers(4, 1, padding=3)) == {FAILED_ANSWERS: 3, LONE_ANSWERS: 1}
    assert lost.answers(**answers(3, 4)) == {FAILED_ANSWERS: 1, LONE_ANSWERS: 0}
    assert caplog.text.count(FAILED_ANSWERS) == 1 and "3 of 8 answers" in caplog.text


def test_an_answer_is_one_however_many_rows_an_agent_makes_of_it():
    assert Lost(config()).answers(**answers(4, 2, rows=3)) == {FAILED_ANSWERS: 2, LONE_ANSWERS: 0}


def test_a_lone_answer_is_no_loss_where_one_is_asked_for():
    given = OmegaConf.merge(config(), {"actor_rollout_ref": {"rollout": {"n": 1}}})
    assert Lost(given).answers(**answers(1, 1)) == {FAILED_ANSWERS: 0, LONE_ANSWERS: 0}


def test_failed_answers_of_a_validation(caplog):
    lost = Lost(config())
    assert lost.validation({("x", "a"): 2, ("x", "b"): 2}, got=4) == {FAILED_VAL_ANSWERS: 0} and not caplog.text
    assert lost.validation({("x", "a"): 2, ("x", "b"): 2}, got=1) == {FAILED_VAL_ANSWERS: 3}
    assert "3 of 4 answers" in caplog.text
    assert lost.validation(None, got=4) == {FAILED_VAL_ANSWERS: 0}


def test_keys_are_verls():
    """`{uid}_{session}_{index}`, of which the trainer's own comments speak too."""
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    source = inspect.getsource(AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess)
    assert 'keys.append(f"{uid}_{session_id}_{i}")' in source


@pytest.mark.parametrize(
    "given, batches", [({"max_num_gen_batches": 3}, 3), ({"max_num_gen_batches": 0}, 100), ({}, 100)]
)
def test_groups_without_a_signal_end_the_run(given, batches):
    lost = Lost(config(enable=True, **given))
    for _ in range(2 * batches):
        lost.refill(1)
    with pytest.raises(RuntimeError, match=r"no signal.*algorithm\.filter_groups\.max_num_gen_batches"):
        lost.refill(1)
    lost.answers(**answers(4, 4))
    lost.refill(2 * batches)  # of the next step


class Rows:
    """As VERL's RLHFDataset: its filter gives back what is short enough."""

    def __init__(self, lengths):
        self.dataframe, self.filter_overlong_prompts, self.max_prompt_length = lengths, False, 5

    def maybe_filter_out_long_prompts(self, rows):
        return [n for n in rows if n <= self.max_prompt_length] if self.filter_overlong_prompts else rows


def changed(prompt_length: int = 5, **data):
    return OmegaConf.merge(config(), {"data": data, "actor_rollout_ref": {"rollout": {"prompt_length": prompt_length}}})


def test_truncation_error_is_an_error():
    rows = Rows([3, 6, 5, 9])
    with pytest.raises(
        ValueError,
        match=r"data\.truncation=error: 2 of 4 .*data\.val_files.*5 tokens.*max_prompt_length.*filter_overlong_prompts",
    ):
        check_lengths(rows, changed(), "data.val_files")
    assert rows.dataframe == [3, 6, 5, 9] and not rows.filter_overlong_prompts, "it is only asked"
    for fine in (Rows([3, 5]), object()):
        check_lengths(fine, changed(), "data.train_files")
    for change in ({"truncation": "left"}, {"filter_overlong_prompts": True}, {"prompt_length": 9}):
        check_lengths(rows, changed(**change), "data.train_files")


@pytest.mark.parametrize("truncation", ["error", "right", "middle"])
def test_a_filter_that_leaves_in_what_rollouts_cut(truncation):
    given = changed(4, truncation=truncation, filter_overlong_prompts=True)
    with pytest.raises(ValueError, match=r"1 of 2 .*4 tokens .*rollout\.prompt_length"):
        check_lengths(Rows([3, 5]), given, "data.train_files")


@pytest.mark.parametrize(
    "train, validation, setting",
    [([1], [1], r"data\.train_files: 1 .*max_prompt_length"), ([], None, r"data\.train_files: 0"), ([1, 1], [], r"data\.val_files: 0")],
)  # fmt: skip
def test_less_than_a_batch_is_left(train, validation, setting):
    with pytest.raises(ValueError, match=setting):
        check_rows(train, validation, config())
    check_rows([1, 1], [1], config())
    check_rows(None, None, config())


def test_verls_dataset_has_what_the_check_asks_for():
    from verl.utils.dataset.rl_dataset import RLHFDataset

    assert callable(RLHFDataset.maybe_filter_out_long_prompts)
