"""When every answer of a batch failed, the error says so.

Symptom: the rollout engine dies while it generates; the run ends with `Sync replay buffer selected terminal groups with no materializable
    trajectories`, which does not say what happened.
Cause: answers that failed count as done, and the replay buffer only notices that none is left.
Upstream: verl 0.9.1, trainer/ppo/v1/replay_buffer.py:509, ReplayBuffer.sample. No issue known.
Remove when: the message names the failed requests.
"""

from types import ModuleType

from verl_patches.retelling import retold

MODULE = "verl.trainer.ppo.v1.replay_buffer"

_TOLD = "no materializable trajectories"
_INSTEAD = (
    "every answer of this batch failed: the rollout engine has died or refuses the requests, or the reward function raises; "
    "the first error stands above. Start the run again to go on from the last checkpoint."
)


def apply(module: ModuleType) -> None:
    buffer = module.ReplayBuffer
    buffer.sample = retold(buffer.sample, RuntimeError, told=_TOLD, instead=_INSTEAD)
