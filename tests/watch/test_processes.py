"""Who belongs to a run and what each process is, and how host memory is counted."""

import os
import subprocess
import sys

import psutil
import pytest
from run_fakes import ENGINE, PAGE, RAYLET, RUNNER, SERVER, WORKER

from megatrain_rl.watch.processes import RunProcesses


def test_roles_under_ray(proc):
    proc.add(121, SERVER, "VLLM::Worker_TP0")
    proc.add(122, WORKER, "python -m compile_worker")
    run = RunProcesses(RUNNER)
    run.refresh()
    assert {pid for pid, role in run.roles.items() if role == "trainer"} == {WORKER}
    assert {pid for pid, role in run.roles.items() if role == "engine"} == {SERVER, ENGINE, 121}
    assert {pid for pid, role in run.roles.items() if role == "other"} == {RAYLET, RUNNER, 122}


def test_without_ray_this_process_trains(proc):
    proc.add(300, 1, "torchrun a raylet")
    proc.add(301, 300, "python -m verl.trainer.sft_trainer")
    proc.add(302, 301, "python loader")
    run = RunProcesses(301)
    run.refresh()
    assert run.roles == {301: "trainer", 302: "other"}


def test_host_memory_counts_shared_pages_once_and_forgets_the_dead(proc):
    run = RunProcesses(RUNNER)
    run.refresh()
    own = (20 - 15) + (30 - 5) + (1000 - 40) + (50 - 5) + (200 - 10)
    assert run.rss_bytes() == {"trainer": 1000 * PAGE, "run": (own + 40) * PAGE}
    proc.remove(WORKER)
    assert run.rss_bytes() == {"trainer": 0, "run": (own - 960 + 15) * PAGE}
    run.refresh()
    assert WORKER not in run.roles


@pytest.mark.parametrize("error", [psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied, FileNotFoundError])
def test_processes_that_end_while_they_are_looked_at(proc, monkeypatch, error):
    run = RunProcesses(RUNNER)
    run.refresh()

    def ended(process):
        raise error(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_info", ended)
    assert run.rss_bytes() == {"trainer": 0, "run": 0}
    monkeypatch.setattr(psutil.Process, "cmdline", ended)
    run.refresh()
    assert run.roles == {RUNNER: "trainer"}, "not even its parent's title can be read"
    monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: ended(process))
    run.refresh()
    assert run.roles == {RUNNER: "trainer"}


def test_a_child_that_ended_and_is_not_collected_costs_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    run = RunProcesses()
    run.refresh()
    assert run.roles[child.pid] == "other" and run.rss_bytes()["run"] > 0
    child.wait()


def test_this_machine():
    """The real /proc: this process, its memory, and a child."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run = RunProcesses()
        run.refresh()
        assert run.roles[os.getpid()] == "trainer" and run.roles[child.pid] == "other"
        rss = run.rss_bytes()
        assert 50 * 2**20 < rss["trainer"] < rss["run"]
    finally:
        child.communicate(b"\n")
