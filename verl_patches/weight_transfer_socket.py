"""Two runs on one machine have weight-transfer sockets of their own.

Symptom: with two runs, each on a GPU of its own, weights of one run reach the engine of the other, or a weight sync
    ends after the time limit.
Cause: the socket in /tmp is named by Ray's job id, and every local Ray cluster counts its jobs from 01000000. The run
    that binds later removes the other's socket.
Upstream: verl 0.9.1, workers/rollout/vllm_rollout/vllm_rollout.py:141 (sender) and vllm_async_server.py:143 (the
    variable that the receiver reads in vLLM's worker, a child of the server). No issue known.
Remove when: the name is unique on the machine.

The patch adds Ray's node id, which is unique: the sender and its engine share a node, and no two nodes have the same
id. Both sides are changed, and only together.
"""

import logging
import os
from types import ModuleType

from verl_patches.ours import engine_lives_here, is_our_rollout
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

log = logging.getLogger(__name__)

VERSIONS = {"verl": TESTED_VERL}
# In this variable the server hands the job's id on to its engine's processes.
VARIABLE = "VERL_RAY_JOB_ID"
UNMARKED = (
    "strategy megatrain, but verl.utils.config.validate_config was not called with this run's config: weight-transfer "
    "sockets may be shared with another run on this machine, vLLM makes text of every answer, and start-up and samples "
    "take longer; call it before run_ppo, as VERL's main_ppo does"
)
# A node's id has 56 letters, and a socket's path may have 107 in all.
_NODE_LETTERS = 16


def apply_to_sender(module: ModuleType) -> None:
    def make(init, self, *args, **kwargs):
        init(self, *args, **kwargs)
        if not is_our_rollout(self.config):
            if engine_lives_here():
                log.warning(UNMARKED)
            return
        job, unique = ids()
        before, after = f"-{job}-", f"-{unique}-"
        if self.zmq_handle.count(before) != 1:
            raise RuntimeError(f"verl_patches/weight_transfer_socket.py: no job id {job} in {self.zmq_handle}")
        self.zmq_handle = self.zmq_handle.replace(before, after)

    wrap(module.ServerAdapter, "__init__", make, patch=__name__)


def apply_to_server(module: ModuleType) -> None:
    def make(init, self, *args, **kwargs):
        init(self, *args, **kwargs)
        if is_our_rollout(self.config):
            os.environ[VARIABLE] = ids()[1]  # the engine's processes start later, in launch_server

    wrap(module.vLLMHttpServer, "__init__", make, patch=__name__)


def ids() -> tuple[str, str]:
    """Ray's id of the job, and an id that no other run on this machine has."""
    import ray

    context = ray.get_runtime_context()
    job = context.get_job_id()
    return job, f"{job}-{context.get_node_id()[:_NODE_LETTERS]}"


HOOKS = {
    "verl.workers.rollout.vllm_rollout.vllm_rollout": apply_to_sender,
    "verl.workers.rollout.vllm_rollout.vllm_async_server": apply_to_server,
}
