"""Files, paths and checkpoints that a run cannot use are refused in the driver, with the setting to change."""

import json
from pathlib import Path

import pytest
from verl_cases import OURS, RUN, composed, data_file, write_prompts

from megatrain_rl.verl_plugin import supported
from megatrain_rl.verl_plugin.driver import files, prepare

TEXT = "What is one and one?"


def run(*overrides: str):
    return composed(*RUN, *OURS, *overrides)


def data(tmp_path: Path, rows: int = 8, prompt=None, name: str = "train.parquet") -> str:
    write_prompts(tmp_path / name, rows, prompt)
    return f"data.train_files={tmp_path / name}"


def test_good_data_of_both_kinds(tmp_path):
    files.check_data(run(data(tmp_path), "data.train_batch_size=8"))
    row = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}}
    lines = [json.dumps(row | {"prompt": [{"role": "user", "content": TEXT}]})] * 8
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    files.check_data(
        run(f"data.train_files=[{tmp_path}/train.jsonl,{tmp_path}/train.parquet]", "data.train_batch_size=16")
    )
    files.check_data(run("data.train_files=hdfs://x/y.parquet"))


@pytest.mark.parametrize(
    "prompt, message",
    [
        (TEXT, "text where a conversation"), ([{"role": "user"}], "conversation"), ([{"content": TEXT}], "conversation"),
        ([{"role": "user", "content": ""}], "without content"), (5, "int"), (["a", "b"], "conversation"),
    ],
)  # fmt: skip
def test_prompts_that_are_no_conversations(tmp_path, prompt, message):
    with pytest.raises(ValueError, match=rf"data\.prompt_key=prompt.*{message}"):
        files.check_data(run(data(tmp_path, prompt=prompt), "data.train_batch_size=8"))


@pytest.mark.parametrize("content", ["", None])
def test_a_question_that_is_missing_beside_a_system_prompt(tmp_path, content):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    with pytest.raises(ValueError, match=r"data\.prompt_key=prompt.*row 0 .*without content"):
        files.check_data(run(data(tmp_path, prompt=prompt), "data.train_batch_size=8"))


def rewarded(tmp_path: Path, *overrides: str, **columns) -> None:
    import pandas as pd

    row = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "1"}} | columns
    row = {"prompt": [{"role": "user", "content": TEXT}]} | {
        key: given for key, given in row.items() if given is not None
    }
    pd.DataFrame([row] * 8).to_parquet(tmp_path / "train.parquet")
    files.check_data(run(f"data.train_files={tmp_path}/train.parquet", "data.train_batch_size=8", *overrides))


OWN = "reward.custom_reward_function.path=mine.py"


@pytest.mark.parametrize(
    "columns", [{"data_source": None}, {"reward_model": None}, {"reward_model": {"style": "rule"}}, {"reward_model": "1"}], ids=str
)  # fmt: skip
@pytest.mark.parametrize("overrides", [[], [OWN]], ids=["VERL's reward", "own reward"])
def test_what_the_reward_function_is_given(tmp_path, columns, overrides):
    with pytest.raises(ValueError, match=r"data\.train_files: row 0 .*data_source.*reward_model.*ground_truth"):
        rewarded(tmp_path, *overrides, **columns)
    rewarded(tmp_path, *overrides)
    agents_own = {"agent_name": "my_agent"}
    rewarded(tmp_path, *overrides, **columns, **agents_own)


def test_a_source_of_data_that_verl_has_no_rule_for(tmp_path):
    with pytest.raises(ValueError, match=r"data_source=digits.*reward\.custom_reward_function\.path"):
        rewarded(tmp_path, data_source="digits")
    rewarded(tmp_path, OWN, data_source="digits")
    rewarded(tmp_path, data_source="math_dapo")


def test_validation_is_looked_at_too(tmp_path):
    given = data(tmp_path, prompt=TEXT).replace("train_files", "val_files")
    with pytest.raises(ValueError, match=r"data\.prompt_key"):
        files.check_data(run(given))


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.train_batch_size=9"], r"data\.train_batch_size=9 .*8 rows"),
        (["data.train_max_samples=4", "data.train_batch_size=8"], r"data\.train_batch_size=8 .*4 rows"),
        (["data.train_batch_size=0"], r"data\.train_batch_size=0"), (["data.train_batch_size=-1"], r"data\.train_batch_size=-1"),
        (["data.max_response_length=0"], r"data\.max_response_length=0"),
        (["data.train_batch_size=8", "data.val_files=null"], r"data\.val_files"),
        (["data.train_batch_size=8", "data.prompt_key=question"], r"data\.prompt_key=question.*has data_source, prompt"),
    ],
)  # fmt: skip
def test_sizes_and_names(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        files.check_data(run(data(tmp_path), *overrides))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"data\.train_files.*nothing\.parquet"):
        files.check_data(run("data.train_files=nothing.parquet"))
    for name, content in (("a.parquet", "text"), ("b.jsonl", "{"), ("c.csv", "x"), ("d.jsonl", "")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"data\.train_files.*{name}"):
            files.check_data(run(f"data.train_files={tmp_path / name}"))


def test_a_dataset_class_of_the_users_reads_what_it_likes(tmp_path):
    files.check_data(run("data.train_files=anything", "data.custom_cls.path=mine.py"))


@pytest.mark.parametrize("way", ["right", "middle"])
def test_truncation_that_rollouts_do_not_honour(way):
    with pytest.raises(ValueError, match=rf"data\.truncation={way}.*filter_overlong_prompts"):
        files.check_truncation(run(f"data.truncation={way}", "data.filter_overlong_prompts=false"))
    files.check_truncation(run(f"data.truncation={way}", "data.filter_overlong_prompts=true"))
    files.check_truncation(run("data.truncation=left", "data.filter_overlong_prompts=false"))


def test_the_reward_function(tmp_path):
    path = tmp_path / "reward.py"
    given = f"reward.custom_reward_function.path={path}"
    with pytest.raises(ValueError, match=r"reward\.custom_reward_function\.path.*reward\.py"):
        files.check_modules(run(given))
    path.write_text("def score(:")
    with pytest.raises(ValueError, match="no Python file"):
        files.check_modules(run(given))
    path.write_text("def score(**kwargs):\n    return 1.0\n")
    with pytest.raises(ValueError, match=r"reward\.custom_reward_function\.name=compute_score.*score"):
        files.check_modules(run(given))
    files.check_modules(run(given, "reward.custom_reward_function.name=score"))
    path.write_text("import functools\ncompute_score = functools.partial(max, 1)\n")
    files.check_modules(run(given))


@pytest.mark.parametrize(
    "path, name",
    [
        ("data.custom_cls.path", "data.custom_cls.name"),
        ("trainer.v1.sampler.custom_sampler.path", "trainer.v1.sampler.custom_sampler.name"),
        ("reward.reward_manager.module.path", "reward.reward_manager.name"),
    ],
)
def test_other_modules_of_the_users(tmp_path, path, name):
    mine = tmp_path / "mine.py"
    given = [f"{path}={mine}", f"{name}=Mine"]
    with pytest.raises(ValueError, match=rf"{path}: there is no file .*mine\.py"):
        files.check_modules(run(*given))
    mine.write_text("class Other: ...\n")
    with pytest.raises(ValueError, match=rf"{name}=Mine.*Other"):
        files.check_modules(run(*given))
    mine.write_text("class Mine: ...\n")
    files.check_modules(run(*given))
    files.check_modules(run(f"{path}=pkg://mine", f"{name}=Mine"))


def test_sft_data(tmp_path):
    def check(*overrides: str) -> None:
        sft = ["engine=megatrain", "optim=megatrain", f"data.train_files={tmp_path}/train.parquet"]
        files.check_sft_data(composed(*sft, *overrides, name="sft_trainer_engine"))

    write_prompts(tmp_path / "train.parquet", 8)
    check("data.train_batch_size=8")
    with pytest.raises(ValueError, match=r"train_batch_size=9 .*8 rows of data\.train_files"):
        check("data.train_batch_size=9")
    with pytest.raises(ValueError, match=r"train_batch_size=8 .*4 rows of data\.train_files"):
        check("data.train_batch_size=8", "data.train_max_samples=4")
    write_prompts(tmp_path / "val.parquet", 2)
    with pytest.raises(ValueError, match=r"train_batch_size=8 .*2 rows of data\.val_files"):
        check("data.train_batch_size=8", f"data.val_files={tmp_path}/val.parquet")
    with pytest.raises(ValueError, match=r"train_batch_size=0"):
        check("data.train_batch_size=0")


@pytest.mark.parametrize(
    "override",
    [
        "custom_reward_function.path=mine.py",
        "reward_model.enable=true",
        "reward_model.model.path=m",
        "sandbox_fusion.url=u",
    ],
)
def test_older_names_of_reward_settings(override):
    with pytest.raises(ValueError, match=rf"{override.split('=')[0]}.*below reward"):
        supported.check_run(run(override))


def resuming(path: str) -> tuple[str, str]:
    return "trainer.resume_mode=resume_path", f"trainer.resume_from_path='{path}'"


def test_the_path_to_resume_from(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wanted = str(tmp_path / "run" / "global_step_3")
    for given in (wanted, wanted + "/", "~/run/global_step_3", "run/global_step_3/"):
        assert files.resume_path(run(*resuming(given))) == wanted
    with pytest.raises(ValueError, match=r"trainer\.resume_from_path.*did you mean .*global_step_3\?"):
        files.resume_path(run(*resuming(wanted + "/actor")))
    for given in (str(tmp_path), "global_step_x", ""):
        with pytest.raises(ValueError, match=r"trainer\.resume_from_path"):
            files.resume_path(run(*resuming(given)))
    with pytest.raises(ValueError, match=r"trainer\.resume_from_path.*resume_mode=resume_path"):
        files.resume_path(run("trainer.resume_mode=auto", f"trainer.resume_from_path={wanted}"))
    with pytest.raises(ValueError, match=r"trainer\.resume_mode=always"):
        files.resume_path(run("trainer.resume_mode=always"))


def test_a_path_to_resume_from_that_nothing_reads(tmp_path):
    given = f"trainer.resume_from_path={tmp_path}/global_step_3"
    with pytest.raises(ValueError, match=r"resume_from_path=.*resume_mode=auto.*resume_mode=resume_path"):
        files.resume_path(run(given))
    assert files.resume_path(run(given, "trainer.resume_mode=disable")) is None
    sft = composed("engine=megatrain", "optim=megatrain", f"{given}/", name="sft_trainer_engine")
    assert files.resume_path(sft) == f"{tmp_path}/global_step_3"


def test_the_home_is_looked_at_where_the_run_will_look(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run" / "global_step_4" / "actor").mkdir(parents=True)
    tracker = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    tracker.write_text("4")
    here = "trainer.default_local_dir='~/run'"
    with pytest.raises(ValueError, match=r"global_step_4.*trainer_state\.json"):
        files.check_resumable(run(here), "actor")
    tracker.write_text("four")
    with pytest.raises(ValueError, match=r"latest_checkpointed_iteration\.txt has 'four'"):
        files.check_resumable(run(here), "actor")
    (tmp_path / "mine.py").write_text("def compute_score(**kwargs): ...\n")
    config = run("reward.custom_reward_function.path='~/mine.py'")
    files.check_modules(config)
    files.expand_home(config)
    assert config.reward.custom_reward_function.path == str(tmp_path / "mine.py")


def whole(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"format": 2}')


@pytest.mark.parametrize("role", ["actor", ""])
def test_the_checkpoint_to_go_on_from(tmp_path, role):
    here = f"trainer.default_local_dir={tmp_path}"
    files.check_resumable(run(here), role)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    files.check_resumable(run(here), role)
    foreign = tmp_path / "global_step_4" / role
    foreign.mkdir(parents=True)
    (foreign / "model_world_size_1_rank_0.pt").touch()
    for given in ([here], resuming(str(tmp_path / "global_step_4"))):
        with pytest.raises(
            ValueError, match=r"(default_local_dir|resume_from_path).*global_step_4.*trainer_state\.json"
        ):
            files.check_resumable(run(*given), role)
    files.check_resumable(run(here, "trainer.resume_mode=disable"), role)
    with pytest.raises(ValueError, match="is not there"):
        files.check_resumable(run(*resuming(str(tmp_path / "global_step_9"))), role)
    whole(tmp_path / "global_step_5" / role)
    files.check_resumable(run(*resuming(str(tmp_path / "global_step_5"))), role)
    whole(tmp_path / ("global_step_6/actor.old" if role else "global_step_6.old"))
    files.check_resumable(run(*resuming(str(tmp_path / "global_step_6"))), role)


def test_the_folder_of_checkpoints(tmp_path):
    (tmp_path / "file").write_text("")
    for given in ("file", "file/run"):
        with pytest.raises(ValueError, match=r"trainer\.default_local_dir.*is a file"):
            files.check_output(run(f"trainer.default_local_dir={tmp_path / given}"))
    files.check_output(run(f"trainer.default_local_dir={tmp_path / 'new' / 'run'}"))


def test_what_is_filled_in(tmp_path, monkeypatch):
    """Epochs for all the steps, and paths as VERL takes them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "d").mkdir()
    write_prompts(tmp_path / "d" / "train.parquet", 1024)
    whole(tmp_path / "run" / "global_step_3" / "actor")
    config = run(
        "trainer.logger=[console]", "trainer.total_epochs=2", "trainer.total_training_steps=77", "data.train_files='~/d/train.parquet'",
        "data.val_files=['~/d/train.parquet']", "trainer.default_local_dir='~/run'", *resuming("~/run/global_step_3/"),
    )  # fmt: skip
    prepare.prepare(config)
    assert config.trainer.total_epochs == 77
    assert config.data.train_files == str(tmp_path / "d" / "train.parquet") == config.data.val_files[0]
    assert config.trainer.default_local_dir == str(tmp_path / "run")
    assert config.trainer.resume_from_path == str(tmp_path / "run" / "global_step_3")


@pytest.mark.parametrize("sft", [False, True])
@pytest.mark.parametrize("done, epochs", [(7, 8), (8, 0), (9, 0)])
def test_a_run_that_has_done_its_steps_gets_no_epoch(tmp_path, caplog, sft, done, epochs):
    """VERL's SFT loop and its older RL trainer would train one step more."""
    whole(tmp_path / f"global_step_{done}" / ("" if sft else "actor"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(done))
    ends = [f"trainer.default_local_dir={tmp_path}", "trainer.total_epochs=2", "trainer.total_training_steps=8"]
    if sft:
        data = f"data.train_files={data_file()}"
        config = composed("engine=megatrain", "optim=megatrain", data, *ends, name="sft_trainer_engine")
        prepare.prepare_sft(config)
    else:
        config = run("trainer.logger=[console]", *ends)
        prepare.prepare(config)
    assert config.trainer.total_epochs == epochs
    assert ("nothing is left to train" in caplog.text) == (epochs == 0)


def test_epochs_without_a_number_of_steps_stay():
    config = run("trainer.logger=[console]", "trainer.total_epochs=2")
    prepare.prepare(config)
    assert config.trainer.total_epochs == 2
