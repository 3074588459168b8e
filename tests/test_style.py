"""Lint, formatting and types, by the settings in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=["check", "format", "types"]
)
def test_the_checker_has_nothing_to_say(command):
    where = [] if command == ["mypy"] else [str(ROOT)]
    run = subprocess.run([sys.executable, "-m", *command, *where], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("file", ["megatrain_rl/trainer.py", "megatrain_rl/streaming/executor.py"])
def test_the_longest_files_stay_readable_at_a_sitting(file):
    assert len((ROOT / file).read_text().splitlines()) < 350
