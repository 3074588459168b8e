"""Building an op where the compiler or the folder does not play along: one error that names what to set."""

import os

import pytest

from megatrain_rl.ops import build


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A cache folder with nothing in it, and no library in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "LIMIT_SECONDS", 0.5)
    build.load_library.cache_clear()
    yield
    build.load_library.cache_clear()


def compiler_that(tmp_path, script: str, monkeypatch) -> None:
    command = tmp_path / "cxx"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("CXX", str(command))


def test_a_compiler_that_hangs_is_stopped(tmp_path, monkeypatch):
    compiler_that(tmp_path, 'if [ "$1" = --version ]; then echo 1; else exec sleep 100; fi', monkeypatch)
    with pytest.raises(RuntimeError, match=r"did not end.*CXX"):
        build.load_library("adamw")
    assert os.listdir(tmp_path / "cache" / "megatrain_rl") == []


def test_a_compiler_that_does_not_even_say_its_name_is_refused(tmp_path, monkeypatch):
    compiler_that(tmp_path, "exec sleep 100", monkeypatch)
    with pytest.raises(ValueError, match="set CXX"):
        build.load_library("adamw")


@pytest.mark.parametrize("broken", ["a file in its place", "not a library"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path, monkeypatch, broken):
    if broken == "not a library":
        compiler_that(
            tmp_path, 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo x > "$2"; shift; done; echo 1', monkeypatch
        )
    else:
        (tmp_path / "cache").write_text("")
    with pytest.raises(ValueError, match="XDG_CACHE_HOME") as error:
        build.load_library("adamw")
    assert str(tmp_path / "cache" / "megatrain_rl") in str(error.value)
