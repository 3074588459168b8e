"""examples/prepare_gsm8k.py: local files become what VERL reads, and VERL's own rule rewards the right answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pandas = pytest.importorskip("pandas")

SCRIPT = Path(__file__).parents[2] / "examples" / "prepare_gsm8k.py"
ROWS = [
    {"question": "Two and three?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "A large one?", "answer": "It is 1,234.\n#### 1,234"},
    {"question": "Below zero?", "answer": "#### -7"},
]


def prepare(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    pandas.DataFrame(ROWS[:1]).to_parquet(tmp_path / "test.parquet")
    return {"train": tmp_path / "train.jsonl", "test": tmp_path / "test.parquet"}


def test_rows_are_verls_and_its_rule_rewards_them(files, tmp_path):
    done = prepare(tmp_path / "out", "--train", files["train"], "--test", files["test"])
    assert done.returncode == 0, done.stderr
    train, test = (pandas.read_parquet(tmp_path / "out" / f"{s}.parquet") for s in ("train", "test"))
    assert (len(train), len(test)) == (3, 1)
    [message] = train["prompt"][0]
    assert (
        message["role"] == "user" and message["content"].startswith("Two and three? ") and "####" in message["content"]
    )
    assert [r["ground_truth"] for r in train["reward_model"]] == ["5", "1234", "-7"]
    reward = pytest.importorskip("verl.utils.reward_score").default_compute_score
    for row in train.to_dict("records"):
        truth = row["reward_model"]["ground_truth"]
        assert reward(row["data_source"], row["extra_info"]["answer"], truth) == 1
        assert reward(row["data_source"], "#### 99", truth) == 0


def test_limit(files, tmp_path):
    prepare(tmp_path / "out", "--train", files["train"], "--test", files["test"], "--limit", 2)
    assert len(pandas.read_parquet(tmp_path / "out" / "train.parquet")) == 2


@pytest.mark.parametrize(
    "content, expected",
    [
        ('{"question": "q", "answer": "no number"}', "the answer does not end with '#### NUMBER': 'no number'"),
        ('{"question": "q"}', "no column answer"),
        ('{"question"', "cannot be read"),
        (None, "no such file"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(files, tmp_path, content, expected):
    bad = tmp_path / "bad.jsonl"
    if content:
        bad.write_text(content)
    done = prepare(tmp_path / "out", "--train", bad, "--test", files["test"])
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("prepare_gsm8k: ") and expected in line
    assert not (tmp_path / "out").exists()


def test_rows_without_a_number_are_left_out_and_counted(files, tmp_path):
    answers = [5, None, float("nan"), "", "#### .", "#### 1.000,5", "#### 12,34", "six", "#### 1,234.5", "#### -7"]
    frame = pandas.DataFrame(
        {"question": [f"Question {i}?" for i in range(len(answers))], "answer": answers}, dtype=object
    )
    frame.loc[len(frame)] = [None, "#### 3"]
    frame.to_json(tmp_path / "odd.jsonl", orient="records", lines=True)
    done = prepare(tmp_path / "out", "--train", tmp_path / "odd.jsonl", "--test", files["test"])
    assert done.returncode == 0 and not done.stderr, done.stderr
    train = pandas.read_parquet(tmp_path / "out" / "train.parquet")
    assert [row["ground_truth"] for row in train["reward_model"]] == ["1234.5", "-7"]
    told = done.stdout.splitlines()[0]
    for words in (
        "2 questions",
        "2, where the answer is empty",
        "1, where the answer is no text",
        "3, where the answer ends with a number",
        "2, where the answer does not end",
        "1, where there is no question",
    ):
        assert words in told
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]


def test_answers_that_are_lists_are_left_out(files, tmp_path):
    frame = pandas.DataFrame({"question": ["a?", "b?"], "answer": [["#### 1", "#### 2"], ["#### 3"]]})
    frame.to_parquet(tmp_path / "lists.parquet")
    done = prepare(tmp_path / "out", "--train", tmp_path / "lists.parquet", "--test", files["test"])
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and "no question is left of 2" in line and "no text" in line


@pytest.mark.parametrize("taken", ["out", "out/test.parquet"])
def test_a_place_that_is_taken_is_one_line_and_no_file_is_half_of_a_pair(files, tmp_path, taken):
    """`out` is a file, or `test.parquet` is a folder."""
    if taken == "out":
        (tmp_path / "out").write_text("mine")
    else:
        (tmp_path / "out" / "test.parquet").mkdir(parents=True)
        (tmp_path / "out" / "train.parquet").write_text("mine")
    done = prepare(tmp_path / "out", "--train", files["train"], "--test", files["test"])
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("prepare_gsm8k: ") and "out" in line
    if taken != "out":
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]
        assert (tmp_path / "out" / "train.parquet").read_text() == "mine"


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_leaves_nothing_is_refused(files, tmp_path, limit):
    done = prepare(tmp_path / "out", "--train", files["train"], "--test", files["test"], "--limit", limit)
    assert done.returncode == 2 and "--limit" in done.stderr


def test_local_files_go_together(files, tmp_path):
    done = prepare(tmp_path / "out", "--train", files["train"])
    assert done.returncode == 2 and "--train and --test" in done.stderr
