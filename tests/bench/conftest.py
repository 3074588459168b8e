"""`run_bench`: a benchmark through the command line, at toy size, and the record it wrote."""

import json
from collections.abc import Callable

import pytest

from megatrain_rl.cli import main


class Written:
    """The record of one run."""

    def __init__(self, content: dict):
        self.content = content
        self.raw: list[str] = content["raw"]

    def figures(self, case: str) -> dict[str, float]:
        return {r["metric"]: r["value"] for r in self.content["results"] if r["case"] == case}


@pytest.fixture
def run_bench(tmp_path, capfd) -> Callable[..., Written]:
    def run(*words: str) -> Written:
        file = tmp_path / "record.json"
        main(["bench", *words, "--quick", "--json", str(file)])
        written = Written(json.loads(file.read_text()))
        printed = capfd.readouterr().out
        assert all(line in printed for line in written.raw)
        assert str(tmp_path) not in file.read_text()
        return written

    return run
