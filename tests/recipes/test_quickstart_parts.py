"""The quickstart's own pieces: the task is honest, progress and failures are shown, the report ends as promised."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "recipes" / "quickstart"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


task = load("task")


def test_answers_are_sums_and_problems_never_repeat():
    problems = task.draw_problems(5000, random.Random(0))
    assert len(set(problems)) == 5000
    assert all(int(p.left) + int(p.right) == int(p.answer) and len(p.answer) == 3 for p in problems)
    assert task.draw_problems(50, random.Random(1)) == task.draw_problems(50, random.Random(1))
    assert task.draw_problems(50, random.Random(1)) != task.draw_problems(50, random.Random(2))


@pytest.mark.parametrize(
    "text, score",
    [("533", 1.0), ("534", 0.2 * 2 / 3), ("999", 0.0), ("53", 0.0), ("5333", 0.0), ("", 0.0), (" 533", 0.0)],
)
def test_reward(text, score):
    assert task.compute_score("", text, "533") == pytest.approx(score)


def test_careless_answers_are_wrong_as_often_as_asked():
    rng = random.Random(0)
    problems = task.draw_problems(4000, rng)
    digits = [a == b for p in problems for a, b in zip(task.careless_answer(p, 0.4, rng), p.answer, strict=True)]
    assert sum(digits) / len(digits) == pytest.approx(0.6 + 0.4 / 10, abs=0.02)
    assert all(task.careless_answer(p, 0.0, rng) == p.answer for p in problems[:100])


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    subprocess.run([sys.executable, HERE / "build.py", folder, "3"], check=True, capture_output=True)
    return folder


def test_held_out_problems_are_in_no_training_file(built):
    pandas = pytest.importorskip("pandas")

    def questions(name, column):
        return {row[0]["content"] for row in pandas.read_parquet(built / name)[column]}

    held_out, train = questions("held_out.parquet", "prompt"), questions("train.parquet", "prompt")
    demonstrations = questions("sft.parquet", "messages")
    assert (len(held_out), len(train), len(demonstrations)) == (256, 1024, 4096)
    assert not held_out & train and not held_out & demonstrations and not train & demonstrations


def test_every_digit_is_one_token_and_text_round_trips(built):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(built / "model")
    ids = tokenizer("132+401 é")["input_ids"]
    assert len(ids) == 10 and tokenizer.decode(ids) == "132+401 é"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"


def test_evaluation_of_a_random_model_is_near_zero(built):
    result = built / "result.json"
    subprocess.run(
        [sys.executable, HERE / "evaluate.py", built / "model", built / "held_out.parquet", result, "1"],
        check=True, capture_output=True,
    )  # fmt: skip
    summary = json.loads(result.read_text())
    assert 0 <= summary["reward"] < 0.05 and summary["greedy_accuracy"] < 0.05 and len(summary["samples"]) == 6


def progress(tmp_path: Path, script: str) -> subprocess.CompletedProcess:
    arguments = ["GRPO", "2", tmp_path / "x.log", tmp_path / "x.jsonl", "--", sys.executable, "-c", script]
    return subprocess.run([sys.executable, HERE / "progress.py", *arguments], capture_output=True, text=True)


def test_progress_shows_what_verl_logs(tmp_path):
    script = (
        "import os, json\nfile = open(os.environ['VERL_FILE_LOGGER_PATH'], 'w')\n"
        "names = ('critic/score/mean', 'actor/kl_loss', 'actor/grad_norm', 'perf/throughput')\n"
        "for i in (1, 2):\n    data = dict(zip(names, (i / 4, 0.1, 2, 99)))\n"
        "    file.write(json.dumps({'step': i, 'data': data}) + '\\n')\nprint('noise')"
    )
    done = progress(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "GRPO 2/2  reward 0.500  kl 0.100  grad 2.00  tok/s 99"
    assert (tmp_path / "x.log").read_text() == "noise\n"


def test_a_failing_stage_is_one_line_that_names_the_log(tmp_path):
    done = progress(tmp_path, "raise SystemExit('broken')")
    assert done.returncode == 1
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("quickstart: GRPO ") and "exit status 1" in line and str(tmp_path / "x.log") in line
    assert "broken" in (tmp_path / "x.log").read_text()


def test_report_ends_with_the_measurements_and_draws_the_curve(tmp_path):
    pytest.importorskip("matplotlib")
    for name, reward, completion in (("before", 0.25, "999"), ("after", 0.9716, "533")):
        summary = {"reward": reward, "greedy_accuracy": reward, "samples": [["132+401", "533", completion]]}
        (tmp_path / f"{name}.json").write_text(json.dumps(summary))
    lines = [json.dumps({"step": i, "data": {"critic/score/mean": i / 10}}) for i in range(1, 6)]
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    files = [tmp_path / name for name in ("before.json", "after.json", "m.jsonl", "curve.png")]
    done = subprocess.run([sys.executable, HERE / "report.py", *files], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "held-out reward: 0.250 -> 0.972"
    assert "'999'" in done.stdout and "'533'" in done.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stopped_stage_leaves_no_process_behind(tmp_path, signum):
    pid_file = tmp_path / "pid"
    script = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(120)"
    arguments = ["stage", "3", tmp_path / "log", tmp_path / "metrics", "--", sys.executable, "-c", script]
    # where the tests run in a shell's background, SIGINT is ignored, and so by what they start
    listening = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    command = [sys.executable, HERE / "progress.py", *arguments]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listening)
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signum)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 1 and "interrupted" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
