"""VERL can open its process groups on a CPU platform.

Symptom: `ValueError: Duplicate device type cpu in backend string: cpu:gloo,cpu:gloo` when a worker or the SFT trainer
    starts.
Cause: both functions that open the group build `cpu:gloo,<device>:<its backend>`, and the device is the CPU.
Upstream: verl 0.9.1, verl/utils/distributed.py:63 and :89. No issue known.
Remove when: VERL builds the string without the duplicate.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch.distributed

from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.utils.distributed"
VERSIONS = {"verl": TESTED_VERL}

_FUNCTIONS = ("initialize_global_process_group", "initialize_global_process_group_ray")


def apply(module: ModuleType) -> None:
    def initialize(function, *args, **kwargs):
        if module.get_device_name() != "cpu":  # torch's function stays as it is where there is nothing to mend
            return function(*args, **kwargs)
        with _each_backend_once():
            return function(*args, **kwargs)

    for name in _FUNCTIONS:
        wrap(module, name, initialize, patch=__name__)


@contextlib.contextmanager
def _each_backend_once() -> Iterator[None]:
    """Within, torch's `init_process_group` drops repeated parts of its backend string. Other strings stay the same."""
    init = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend is not None:
            backend = ",".join(dict.fromkeys(backend.split(",")))
        init(backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group
    try:
        yield
    finally:
        torch.distributed.init_process_group = init
