"""The rollout engine's memory allocator gives blocks back before it outgrows what the GPU's division has for it.

Symptom: beside a resident engine that was given most of the card, almost nothing of the card is left free, and a
    kernel that either process loads late has no room.
Cause: vLLM bounds what it plans, not what its allocator keeps. Blocks of sizes that are no longer needed stay with the
    engine until the whole card is full.
Upstream: verl 0.9.1, workers/rollout/vllm_rollout/vllm_async_server.py:94, vLLMHttpServer.__init__ hands its
    environment on to the engine's processes. torch reads `per_process_memory_fraction` there. No issue known.
Remove when: vLLM sets the bound itself.

At the bound torch first frees the blocks that nobody uses, and only then reports that memory is out.
"""

import os
from types import ModuleType

from verl_patches.ours import rollout_plan
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.workers.rollout.vllm_rollout.vllm_async_server"
# Earlier versions of torch end with an error when they find an option that they do not know.
VERSIONS = {"verl": TESTED_VERL, "torch": ">=2.11"}
# Either name is read by torch, and the older one is what users have set.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
OPTION = "per_process_memory_fraction"


def apply(module: ModuleType) -> None:
    def make(init, self, *args, **kwargs):
        init(self, *args, **kwargs)
        fraction = rollout_plan(self.config.custom).get("engine_torch_fraction")  # of a rollout of ours alone
        if fraction is not None:
            _set(fraction)  # the engine's processes start later, in launch_server

    wrap(module.vLLMHttpServer, "__init__", make, patch=__name__)


def _set(fraction: float) -> None:
    """Add the option to the allocator's options in this process's environment; one that the user has set stays."""
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if any(OPTION in options for options in given.values()):
        return
    option = f"{OPTION}:{min(1.0, fraction):.4f}"
    for name in given or VARIABLES[-1:]:
        os.environ[name] = ",".join(filter(None, (given.get(name), option)))
