"""The examples run as they stand, and what they train learns."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def values(example: str, name: str, device: str, *arguments: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, EXAMPLES / example, "--device", device, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(value) for value in re.findall(rf"{name} ([-\d.]+)", done.stdout)]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_sft_streaming(device):
    losses = values("sft_streaming.py", "loss", device)
    assert len(losses) == 30 and losses[0] > 3.5 and losses[-1] < 1.2


@pytest.mark.parametrize("device", DEVICES)
def test_grpo_streaming(device):
    rewards = values("grpo_streaming.py", "reward", device)
    assert len(rewards) == 40 and rewards[0] < 0.3 and sum(rewards[-3:]) / 3 > 0.8
