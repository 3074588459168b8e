"""Compile a C++ source of this package into a shared library, once per source, flags, compiler and processor.

The ops have a plain C interface and are called through ctypes: they build in a second or two with the compiler alone
(no torch headers, no ABI to match) and ctypes lets go of the interpreter lock during the call.
"""

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCES = Path(__file__).parent / "csrc"
# -ffp-contract=off: every operation rounds once, so the native op and its torch reference agree to the bit.
# -fno-trapping-math: no floating-point exception is ever looked at, which lets branches become vector selects.
_FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC",
)  # fmt: skip
# An op compiles in a second or two; on a machine that swaps or has a network for a disk, in many.
LIMIT_SECONDS = 300.0
# gcc prefers half of AVX-512's width unless told; the loop is bound by memory and square roots, not by the clock
_X86_FLAGS = ("-mprefer-vector-width=512",)


def _processor() -> str:
    """Names what -march=native depends on: a cache folder may be shared by machines of different processors."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        wanted = [
            line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))
        ]
        return "\n".join(sorted(set(wanted)))
    return platform.processor() + platform.machine()


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """A C++ compiler that runs. version: what it says of itself."""

    command: str
    version: str
    flags: tuple[str, ...]

    def build(self, source: Path, library: Path, *more_flags: str) -> None:
        """Compile `source` into the shared library `library`. A failure is a RuntimeError with the compiler's words,
        and so is a compiler that does not end.
        """
        command = [self.command, *self.flags, *more_flags, str(source), "-o", str(library)]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"building {source.name} did not end within {LIMIT_SECONDS:.0f} s, which takes seconds: try the command "
                f"{' '.join(command)!r}, or set CXX to another compiler"
            ) from error
        if run.returncode:
            raise RuntimeError(f"building {source.name} failed:\n{run.stderr}")


def compiler() -> Compiler:
    """The compiler of $CXX, or g++; a ValueError with the settings to change when it does not run."""
    command = os.environ.get("CXX", "g++")
    try:
        asked = subprocess.run(
            [command, "--version"],
            capture_output=True,
            text=True,
            check=True,
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"the native host optimizer needs a C++ compiler and {command!r} does not run; install g++, set CXX, or set "
            "optimizer=torch"
        ) from error
    flags = (*_FLAGS, *(_X86_FLAGS if platform.machine() == "x86_64" else ()))
    return Compiler(command=command, version=asked.stdout, flags=flags)


def source_of(name: str) -> Path:
    """The C++ source of an op."""
    return _SOURCES / f"{name}.cpp"


@functools.cache
def load_library(name: str) -> ctypes.CDLL:
    """The library of `csrc/{name}.cpp`. Built into $XDG_CACHE_HOME/megatrain_rl when it is not there yet.

    A missing compiler and a folder that cannot be used are ValueErrors with the settings to change, a failed build is a
    RuntimeError with the compiler's words.
    """
    source, cxx = source_of(name), compiler()
    parts = [source.read_text(), *cxx.flags, cxx.version, _processor()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatrain_rl"
    library = folder / f"{name}-{key}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = Path(scratch) / "op.so"
                cxx.build(source, built)
                os.replace(built, library)  # whole or not at all, also when several processes build at once
        return ctypes.CDLL(str(library))
    except OSError as error:  # read-only, full, mounted noexec
        raise ValueError(
            f"the op {name} cannot be built in or loaded from {folder} ({error}): set XDG_CACHE_HOME to a folder that can be written "
            "and run from"
        ) from error
