"""The hardware, versions and commit that a record was measured with."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """The fields `commit`, `hardware`, `versions` and `date` of a record; asking for them may make a CUDA context. The
    environment variable MEGATRAIN_COMMIT names the commit of a copy without git."""
    return {
        "commit": os.environ.get("MEGATRAIN_COMMIT") or _commit() or "unknown",
        "hardware": _hardware(),
        "versions": _versions(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    """The commit that is checked out; empty outside a repository."""
    run = subprocess.run(
        ["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return run.stdout.strip()


def _hardware() -> dict[str, Any]:
    hardware: dict[str, Any] = {
        "cores": os.cpu_count(),
        "host_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        hardware |= {"gpu": properties.name, "gpu_gib": round(properties.total_memory / 2**30)}
    return hardware


def _versions() -> dict[str, str | None]:
    import transformers

    from megatrain_rl import __version__

    versions: dict[str, str | None] = {
        "megatrain_rl": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for name in ("verl", "vllm", "ray", "deepspeed"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        versions["cuda"] = torch.version.cuda
    versions["python"] = platform.python_version()
    return versions
