"""The lock file of a DeepSpeed build that was killed is told of, waited for within limits, and named."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.ops import build_locks
from megatrain_rl.optim.host_adamw import make_library


@pytest.fixture
def lock(tmp_path, monkeypatch) -> Path:
    """What a killed build of cpu_adam leaves."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(build_locks, "_TOLD_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(build_locks, "_LOOK_SECONDS", 0.01)
    file = tmp_path / "cpu_adam" / "lock"
    file.parent.mkdir()
    file.touch()
    return file


@pytest.fixture
def builder(lock):
    """A process that builds: like torch it keeps the file open."""
    lock.unlink()
    code = f"import os; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); print('locked', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


@pytest.fixture
def when_told():
    """Lets a test do something when the line in the log comes."""
    handlers = []

    def do(work) -> None:
        handler = logging.Handler()
        handler.emit = lambda record: work()
        build_locks.log.addHandler(handler)
        handlers.append(handler)

    yield do
    for handler in handlers:
        build_locks.log.removeHandler(handler)


def test_the_optimizer_s_wait_ends_and_names_the_file(lock, monkeypatch):
    """Without the limit this test would not end."""
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(build_locks, "ABANDONED_SECONDS", 0.1)
    with pytest.raises(ValueError, match=r"optimizer=deepspeed.*TORCH_EXTENSIONS_DIR") as error:
        make_library(StreamConfig(optimizer="deepspeed"), AdamWConfig())
    assert str(lock) in str(error.value) and lock.exists()


def test_it_is_told_meanwhile_and_goes_on_when_the_file_is_gone(lock, caplog, when_told):
    when_told(lock.unlink)  # as the line advises
    build_locks.wait_for_builds("cpu_adam", wanted_by="optimizer=deepspeed")
    [line] = caplog.messages
    assert str(lock) in line and "no process" in line


def test_one_that_builds_is_named_and_waited_for_longer(lock, builder, monkeypatch, caplog, when_told):
    monkeypatch.setattr(build_locks, "ABANDONED_SECONDS", 0.0)
    when_told(lock.unlink)  # as torch does when it has built
    build_locks.wait_for_builds("cpu_adam", wanted_by="optimizer=deepspeed")
    assert f"process {builder.pid} " in caplog.text


def test_one_that_builds_for_ever_is_named_in_the_error(lock, builder, monkeypatch):
    monkeypatch.setattr(build_locks, "LIMIT_SECONDS", 0.1)
    with pytest.raises(ValueError, match=f"process {builder.pid} "):
        build_locks.wait_for_builds("cpu_adam", wanted_by="optimizer=deepspeed")
    builder.kill()
    builder.wait()
    assert build_locks.builder_of(lock) is None


def test_without_a_lock_nothing_is_said(lock, caplog):
    lock.unlink()
    build_locks.wait_for_builds("cpu_adam", wanted_by="optimizer=deepspeed")
    build_locks.wait_for_builds("another_op", wanted_by="optimizer=deepspeed")
    assert not caplog.messages


@pytest.mark.parametrize("given", [True, False])
def test_the_folder_is_the_one_that_torch_builds_in(tmp_path, monkeypatch, given):
    from torch.utils import cpp_extension

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if given:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "mine"))
    else:
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    ours = build_locks.build_folder("some_op")
    assert not ours.exists()
    assert str(ours) == cpp_extension._get_build_directory("some_op", False)


def test_torch_s_lock_is_a_file_of_that_name(tmp_path):
    """The reason of it all: torch takes the file for its lock, and waits while it is there."""
    from torch.utils import cpp_extension

    names = []

    class Baton(cpp_extension.FileBaton):
        def __init__(self, path, *args, **more):
            names.append(path)
            super().__init__(path, *args, **more)

        def wait(self):
            raise TimeoutError("it would wait")

    (tmp_path / "lock").touch()
    source = tmp_path / "op.cpp"
    source.write_text("")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(cpp_extension, "FileBaton", Baton)
        cpp_extension.load("some_op", [str(source)], build_directory=str(tmp_path))
    assert names == [os.path.join(tmp_path, "lock")]
