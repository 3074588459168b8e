"""A step's time is the interval between returns; the last one pays for what is still running."""

import pytest

from megatrain_rl.bench import series
from megatrain_rl.bench.series import run_series


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(series.time, "perf_counter", lambda: Clock.now)
    return Clock


def test_intervals_and_total(clock):
    durations = [50.0, 9.0, 2.0, 3.0, 4.0]
    ran, lines = [], []

    def step(i: int) -> str:
        clock.now += durations[i]
        ran.append(i)
        return f"step text {i}"

    def finish() -> None:
        assert ran == [0, 1, 2, 3, 4], "waits once, after the last step"
        ran.append("finish")
        clock.now += 0.5

    out = run_series(step, finish, warmup=2, steps=3, say=lines.append)
    assert out.intervals == [2.0, 3.0, 4.5] and out.median == 3.0 and out.total == 9.5
    assert ran[-1] == "finish" and len(lines) == 5
    assert lines[0] == "warm-up 0: 50.000 s, step text 0" and lines[4] == "step 4: 4.500 s, step text 4"


def test_without_warmup_the_first_step_counts_from_its_start(clock):
    def step(i: int) -> str:
        clock.now += 1.0
        return ""

    assert run_series(step, lambda: None, warmup=0, steps=3, say=lambda line: None).intervals == [1.0, 1.0, 1.0]
