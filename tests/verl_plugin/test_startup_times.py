"""Phases of the start-up: in order, each once, from the driver's start to the first step."""

import os
import time

import psutil
import pytest

from megatrain_rl.verl_plugin import startup_times
from megatrain_rl.verl_plugin.startup_times import END, STARTED_VARIABLE, StartupTimes


class Clock:
    now = 1000.0

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(startup_times.time, "time", lambda: clock.now)
    monkeypatch.delenv(STARTED_VARIABLE, raising=False)
    return clock


def run(clock: Clock) -> StartupTimes:
    times = StartupTimes()
    for phase, seconds in (("data", 1), ("worker", 2), ("worker", 4), ("engine", 8), (END, 1000), (END, 1000)):
        times.mark(phase)
        clock.pass_(seconds)
    return times


def test_phases_last_until_the_next_begins(clock):
    assert run(clock).phases_s() == {"data": 1, "worker": 6, "engine": 8}


def test_the_first_begins_with_the_command(clock, monkeypatch):
    monkeypatch.setenv(STARTED_VARIABLE, str(clock.now - 256))
    times = run(clock)
    assert times.phases_s() == {"Ray and the task runner": 256, "data": 1, "worker": 6, "engine": 8}
    assert times.table() == "start-up took 271.0 s: Ray and the task runner 256.0, data 1.0, worker 6.0, engine 8.0"


def test_a_phase_that_goes_on_has_no_seconds_yet(clock):
    times = StartupTimes()
    assert times.phases_s() == {}
    times.mark("data")
    clock.pass_(5)
    assert times.phases_s() == {}


def test_the_driver_notes_when_its_process_began(monkeypatch):
    monkeypatch.setenv(STARTED_VARIABLE, "")
    startup_times.note_start()
    began = float(os.environ[STARTED_VARIABLE])
    assert began == psutil.Process().create_time() and 0 < time.time() - began < 3600
