"""Lint and formatting, by the settings in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=lambda c: c[0])
def test_ruff_has_nothing_to_say(command):
    run = subprocess.run([sys.executable, "-m", "ruff", *command, str(ROOT)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
