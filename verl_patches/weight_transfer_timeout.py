"""A weight sync to a dead rollout engine ends with an error, and one whose bucket is too small names the setting.

Symptom: the engine's process dies, or fails while it loads weights, and the run stays in `update_weights` for ever,
    without a message. Without CUDA IPC, a tensor larger than the bucket fails an assertion that names a setting which
    does not exist.
Cause: the sender waits on its socket without a limit, for an answer that only the engine's worker sends.
Upstream: verl 0.9.1, workers/rollout/vllm_rollout/bucketed_weight_transfer.py: BucketedWeightSender._init_socket and
    every `recv`. No issue known.
Remove when: the sender has a time limit of its own.
"""

import os
from types import ModuleType

from verl_patches.ours import engine_lives_here
from verl_patches.versions import TESTED_VERL
from verl_patches.wrap import wrap

MODULE = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
VERSIONS = {"verl": TESTED_VERL}

# Seconds until the engine's worker connects, and seconds until every answer after that, so for loading one bucket. A
# healthy engine takes a second or two.
LIMIT_SECONDS = 30.0
LIMIT_VARIABLE = "MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT"


def limit_seconds() -> float:
    """The limit in seconds: MEGATRAIN_WEIGHT_TRANSFER_TIMEOUT if it is set, else LIMIT_SECONDS.

    A ValueError if the variable is no number above 0.
    """
    given = os.environ.get(LIMIT_VARIABLE)
    try:
        limit = LIMIT_SECONDS if given is None else float(given)
    except ValueError:
        limit = -1.0
    if not limit > 0:
        raise ValueError(f"{LIMIT_VARIABLE}={given}: must be a number of seconds above 0")
    return limit


def apply(module: ModuleType) -> None:
    import zmq

    def make_socket(init_socket, self):
        init_socket(self)
        if not engine_lives_here():
            return
        limit = int(limit_seconds() * 1000)
        self.socket.setsockopt(zmq.RCVTIMEO, limit)
        self.socket.setsockopt(zmq.SNDTIMEO, limit)
        self.socket.setsockopt(zmq.LINGER, 0)

    async def send_weights(send, self, weights):
        if not engine_lives_here():
            return await send(self, weights)
        try:
            await send(self, weights)
        except zmq.Again as error:
            raise RuntimeError(
                f"the rollout engine took no weights for {limit_seconds():g} s: it has died or hangs, its own error "
                f"stands above. (Limit: {LIMIT_VARIABLE}.)"
            ) from error
        except AssertionError as error:
            if "too large to fit in the bucket" not in str(error):
                raise
            raise ValueError(
                "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes="
                f"{self.bucket_size_mb} is smaller than a tensor, and without CUDA IPC a tensor has to fit: raise it. "
                f"({str(error).split('.Please')[0]})"
            ) from error

    wrap(module.BucketedWeightSender, "_init_socket", make_socket, patch=__name__)
    wrap(module.BucketedWeightSender, "async_send_weights", send_weights, patch=__name__)
