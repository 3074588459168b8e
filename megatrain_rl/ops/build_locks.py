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

# DeepSpeed's largest op takes a minute or two to build.
LIMIT_SECONDS = 300.0
_TOLD_AFTER_SECONDS = 5.0
_LOOK_SECONDS = 0.1


def wait_for_build(name: str, *, wanted_by: str) -> None:
    """Return when nobody builds the op `name`. A ValueError that names the file after LIMIT_SECONDS."""
    lock = build_folder(name) / "lock"
    began = time.monotonic()
    told = False
    while lock.exists():
        waited = time.monotonic() - began
        if waited > LIMIT_SECONDS:
            raise ValueError(
                f"{wanted_by}: waited {LIMIT_SECONDS:.0f} s for the build of {name}, which is locked by {lock}; {_owner(lock)}. Delete "
                "that file if nobody builds it (a build that was killed leaves it), or set TORCH_EXTENSIONS_DIR to another folder"
            )
        if waited > _TOLD_AFTER_SECONDS and not told:
            told = True
            log.warning(
                "%s: waiting for the build of %s, locked by %s; %s. If its build was killed, delete that file: this goes on then.",
                wanted_by, name, lock, _owner(lock),
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


def _owner(lock: Path) -> str:
    """Who builds: it keeps the file open. On another machine, or another user's, it cannot be seen."""
    path = str(lock.resolve())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or gone
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) == path:
                        return f"process {process.name} builds it"
    return "no process that can be seen from here builds it"
