"""vllm_venv.py: nothing outlives its time, and what has no CPU build is said in one line."""

import os
import platform
import sys
import time
from collections.abc import Callable

import psutil
import pytest
import vllm_venv

# A child in the group, one that has left it, and the command itself.
FAMILY = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
print("pids", *[subprocess.Popen(sleeper, start_new_session=own).pid for own in (False, True)], flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


def children(log) -> list[int]:
    return [int(pid) for pid in log.read_text().split("pids ")[1].split()[:2]]


def gone(pid: int) -> bool:
    """Ended, or about to be collected by whoever inherited it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_command_that_takes_too_long_is_ended_with_all_its_processes(tmp_path):
    log = tmp_path / "log"
    running = vllm_venv.start([sys.executable, "-c", FAMILY, 600, 0], log=log)
    assert soon(lambda: log.exists() and "pids" in log.read_text())
    with pytest.raises(AssertionError, match=r"took more than 0\.5 s"):
        vllm_venv.finish(running, seconds=0.5, log=log)
    assert soon(lambda: all(gone(pid) for pid in [running.process.pid, *children(log)]))


def soon(condition: Callable[[], bool]) -> bool:
    """Wait until `condition` holds; 30 seconds only end a hang."""
    limit = time.monotonic() + 30
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_command_leaves_behind_is_ended_and_its_failure_told(tmp_path, code):
    log = tmp_path / "log"
    running = vllm_venv.start([sys.executable, "-c", FAMILY, 0.2, code], log=log)
    try:
        if code:
            with pytest.raises(AssertionError, match=r"(?s)ended with 3\b.*pids"):
                vllm_venv.finish(running, seconds=20, log=log)
        else:
            vllm_venv.finish(running, seconds=20, log=log)
        in_group, left_it = children(log)
        assert soon(lambda: gone(in_group))
    finally:
        os.kill(left_it, 9)


@pytest.mark.parametrize(
    ("system", "machine", "version", "expected"),
    [
        ("linux", "x86_64", (3, 11, 7), None),
        ("linux", "x86_64", (3, 12, 0), None),
        ("linux", "x86_64", (3, 10, 0), "for Python"),
        ("linux", "x86_64", (3, 13, 0), "for Python"),
        ("linux", "aarch64", (3, 11, 7), "for linux on aarch64"),
        ("darwin", "x86_64", (3, 11, 7), "for darwin"),
    ],
)
def test_only_a_missing_build_is_a_reason_to_skip(monkeypatch, system, machine, version, expected):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "version_info", version)
    reason = vllm_venv.why_no_cpu_build()
    assert reason is None if expected is None else expected in reason


def test_an_environment_that_cannot_be_made_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_venv, "FOLDER", tmp_path / "venv")
    monkeypatch.setattr(vllm_venv, "TORCH", "no-such-folder/torch.whl")
    with pytest.raises(AssertionError, match="no-such-folder"):
        vllm_venv.make(seconds=60)
    assert not (tmp_path / "venv" / "made-from").exists()
