"""Records: fields, rounding, and a command anybody can repeat."""

import json
from pathlib import Path

import pytest

from megatrain_rl.bench.record import Record, check_append, check_writable, command_line, partial, rounded


def test_fields(tmp_path, capsys):
    record = Record(["bench", "step", "--json", str(tmp_path / "a.json")])
    record.say("a raw line")
    record.result("7b", "step_s", 1.23456, "s")
    record.result("7b", "matmul_fraction", 0.5, "")
    record.keep_in(tmp_path / "a.json")
    record.finish()
    written = json.loads((tmp_path / "a.json").read_text())
    assert set(written) == {"command", "commit", "hardware", "versions", "date", "raw", "results"}
    assert written["raw"] == ["a raw line"]
    assert written["results"] == [
        {"case": "7b", "metric": "step_s", "value": 1.235, "unit": "s"},
        {"case": "7b", "metric": "matmul_fraction", "value": 0.5, "unit": ""},
    ]
    assert {"torch", "python"} <= set(written["versions"]) and written["hardware"]["cores"] > 0
    assert str(tmp_path) not in json.dumps(written)
    assert capsys.readouterr().out == "a raw line\n7b step_s 1.235 s\n7b matmul_fraction 0.5\n"


@pytest.mark.parametrize("words", [["--json", "/some/where/x.json"], ["--json=/some/where/x.json"]])
def test_command_names_the_repositorys_folder(words):
    assert "/some" not in command_line(words) and "recipes/records/x.json" in command_line(words)


def test_command_keeps_everything_else():
    words = ["bench", "step", "--set", "pack_tokens=64", "--trace", "/a/t.json", "--case", "a b=7"]
    expected = "megatrain-rl bench step --set pack_tokens=64 --trace recipes/records/t.json --case 'a b=7'"
    assert command_line(words) == expected


@pytest.mark.parametrize(
    "value, short", [(123456.7, 123500), (1234.4, 1234), (0.123456, 0.1235), (0, 0), (-2e6, -2000000)]
)
def test_four_digits(value, short):
    assert rounded(value) == short
    assert isinstance(rounded(value), int) == (abs(value) >= 1000)


def test_append_keeps_other_cases_and_replaces_the_same(tmp_path):
    path = tmp_path / "a.json"
    for argv, case, value in (("one", "7b", 1.0), ("two", "14b", 2.0), ("three", "7b", 3.0)):
        check_append(path, True)
        record = Record([argv])
        record.keep_in(path, append=True)
        record.say(f"line {argv}")
        record.result(case, "step_s", value, "s")
        record.finish()
    written = json.loads(path.read_text())
    assert written["command"] == "megatrain-rl one; megatrain-rl two; megatrain-rl three"
    assert written["raw"] == ["line one", "line two", "line three"]
    assert [(r["case"], r["value"]) for r in written["results"]] == [("14b", 2.0), ("7b", 3.0)]


def test_append_refuses_another_commit(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    monkeypatch.setenv("MEGATRAIN_COMMIT", "a" * 40)
    record = Record(["one"])
    record.say("a line")
    record.keep_in(path)
    record.finish()
    check_append(path, True)
    monkeypatch.setenv("MEGATRAIN_COMMIT", "b" * 40)
    with pytest.raises(ValueError, match="another commit"):
        check_append(path, True)
    with pytest.raises(ValueError, match="--json"):
        check_append(None, True)


def test_every_figure_is_written_at_once_and_the_old_record_stays_until_the_end(tmp_path):
    """A command that is killed leaves what it knew."""
    path = tmp_path / "a.json"
    path.write_text("the record before")
    record = Record(["one"])
    record.keep_in(path)
    for known in range(1, 4):
        record.result("7b", f"metric {known}", known, "s")
        assert [r["value"] for r in json.loads(partial(path).read_text())["results"]] == list(range(1, known + 1))
    assert path.read_text() == "the record before"
    record.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and len(json.loads(path.read_text())["results"]) == 3


def test_a_command_without_a_line_leaves_what_was_there(tmp_path):
    partial(tmp_path / "a.json").write_text("of a command that was killed")
    record = Record(["one"])
    record.keep_in(tmp_path / "a.json")
    record.finish()
    assert [p.read_text() for p in tmp_path.iterdir()] == ["of a command that was killed"]


def test_a_place_that_cannot_be_written_to_is_told_first(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--json /dev/null"):
        check_writable(Path("/dev/null"), "--json")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match=r"--json .*a\.json"):
        check_writable(tmp_path / "a.json", "--json")
