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
from pathlib import Path

_SOURCES = Path(__file__).parent / "csrc"
# -ffp-contract=off: every operation rounds once, so the native op and its torch reference agree to the bit.
# -fno-trapping-math: no floating-point exception is ever looked at, which lets branches become vector selects.
_FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC",
)  # fmt: skip
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


@functools.cache
def load_library(name: str) -> ctypes.CDLL:
    """The library of `csrc/{name}.cpp`. Built into $XDG_CACHE_HOME/megatrain_rl when it is not there yet.

    A missing compiler is a ValueError with the setting to change, a failed build a RuntimeError with the compiler's
    words.
    """
    source = _SOURCES / f"{name}.cpp"
    compiler = os.environ.get("CXX", "g++")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"the native host optimizer needs a C++ compiler and {compiler!r} does not run; install g++, set CXX, or set "
            "optimizer=torch"
        ) from error
    flags = [*_FLAGS, *(_X86_FLAGS if platform.machine() == "x86_64" else ())]
    key = hashlib.sha256("\0".join([source.read_text(), *flags, version, _processor()]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatrain_rl"
    library = folder / f"{name}-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "op.so"
            run = subprocess.run([compiler, *flags, str(source), "-o", str(built)], capture_output=True, text=True)
            if run.returncode:
                raise RuntimeError(f"building {source.name} failed:\n{run.stderr}")
            os.replace(built, library)  # whole or not at all, also when several processes build at once
    return ctypes.CDLL(str(library))
