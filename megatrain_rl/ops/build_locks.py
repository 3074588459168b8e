"""Wait for the lock file of an op that torch.utils.cpp_extension builds, aloud and not for ever.

It makes a file named `lock` in the op's folder and removes it when it is done. One that was killed meanwhile leaves it
there, and every later process waits for it for ever without a word. DeepSpeed's ops are built that way; this package's
own (build.py) and those of torch.compile and Triton have no such file.
"""

import contextlib
import logging
import os
import sys
import time
from pathlib import Path

import torch

log = logging.getLogger(__name__)

# A build takes a minute or two, and longer on a busy machine.
LIMIT_SECONDS = 600.0
# The same where no process of this machine has the lock open. One of another machine, with the same home folder, may.
ABANDONED_SECONDS = 120.0
_TOLD_AFTER_SECONDS = 5.0
_LOOK_SECONDS = 0.5


def wait_for_builds(*names: str, wanted_by: str) -> None:
    """Return when nobody builds the ops `names`. A ValueError that names the file when that takes too long."""
    for name in names:
        _wait_for_build(name, wanted_by)


def _wait_for_build(name: str, wanted_by: str) -> None:
    lock = build_folder(name) / "lock"
    began = time.monotonic()
    told = False
    while lock.exists():
        waited = time.monotonic() - began
        if waited > _TOLD_AFTER_SECONDS:
            builder = builder_of(lock)
            who = f"process {builder}" if builder else "no process that can be seen from here"
            if waited > (LIMIT_SECONDS if builder else ABANDONED_SECONDS):
                raise ValueError(
                    f"{wanted_by}: waited {waited:.0f} s for the build of {name}, which {lock} says is under way; {who} has "
                    "that file open. Delete it if nobody builds (a build that is killed leaves it), or set "
                    "TORCH_EXTENSIONS_DIR to another folder"
                )
            if not told:
                told = True
                log.warning(
                    "%s: waiting for the build of %s, which %s says is under way; %s has that file open. If the build was killed, "
                    "delete it: this goes on then.", wanted_by, name, lock, who,
                )  # fmt: skip
        time.sleep(_LOOK_SECONDS)


def build_folder(name: str) -> Path:
    """Where torch.utils.cpp_extension builds the op `name`, without making the folder as torch's own function does."""
    from torch.utils import cpp_extension  # it looks for compilers when it is imported

    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        return Path(given) / name
    if torch.version.hip is not None:
        accelerator = f"rocm{torch.version.hip.replace('.', '')}"
    else:
        accelerator = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(cpp_extension.get_default_build_root()) / f"{python}_{accelerator}" / name


def builder_of(lock: Path) -> int | None:
    """The process that has the lock open, as a builder does. None if it cannot be seen: of another machine or user."""
    path = str(lock.resolve())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) == path:
                        return int(process.name)
    return None
