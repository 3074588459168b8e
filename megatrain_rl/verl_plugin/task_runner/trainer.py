"""Subclasses of VERL's trainers. Training itself is VERL's; a run of ours gains these things around it:

- Two parts of the start-up go on while the task runner waits for another, and the phases are timed.
- Memory is sampled from the start, and the logger is watched (monitoring.py).
- The log-probs of the rollout and of the trainer are compared.
- Samples are taken soon after they are ready.
- Two errors are raised in plain words (failures.py).

VERL finds the subclasses in its own registry under the names in `verl_patches.ours.TRAINERS`, which the driver puts in
the place of VERL's (driver/prepare.py). To everything else the run's mode is VERL's: `sync` or `colocate_async`.
"""

import contextlib
import importlib
import logging
from typing import TYPE_CHECKING, Any, cast

import torch
import transfer_queue
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSync, register_trainer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from megatrain_rl.verl_plugin import monitoring
from megatrain_rl.verl_plugin.startup_times import END, StartupTimes
from megatrain_rl.verl_plugin.task_runner.failures import told_again
from megatrain_rl.watch.memory import MemoryWatch
from verl_patches import transfer_queue_start
from verl_patches.deferred import Deferred
from verl_patches.ours import TRAINERS

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Trainer
else:
    _Trainer = object  # RunOfOurs is mixed into several trainers, each of which is a PPOTrainer

# VERL's replay buffer looks for finished samples, sleeps, and looks again. It sleeps 2 s by default, and no setting of
# VERL's changes that. One look costs milliseconds.
POLL_SECONDS = 0.05
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
# VERL builds a run's parts in one long method. An attribute that it assigns shows how far it is. Here, for each such
# attribute, is the phase that begins with its assignment.
_PHASES = {
    "resource_pool_to_cls": "worker process",
    "actor_rollout_wg": "trainer, GPU memory",
    "ref_policy_wg": "reward workers",
    "reward_loop_manager": "rollout engine",
    "llm_server_manager": "rest of the model, checkpoint",
}
# The first is assigned when the trainer's process has been started and is about to load its model. One of the others is
# assigned when that process has taken its GPU memory.
_WORKER_STARTED, _WORKER_READY = "actor_rollout_wg", ("ref_policy_wg", "reward_loop_manager")


class RunOfOurs(_Trainer):
    """A mixin that stands before a trainer of VERL's and adds to it, as the module's docstring says.

    Every process of a run first imports for 10 to 20 s, and VERL's task runner waits for each in turn. Here two of
    these waits take place while the task runner waits for the trainer's process:

    - the start of TransferQueue (verl_patches/transfer_queue_start.py);
    - the import of the rollout server's class, and with it all of vLLM, which VERL needs only later, to hand the class
      to Ray.
    """

    def __init__(self, config: DictConfig):
        verls = {ours: mode for mode, ours in TRAINERS.items()}
        mode = config.trainer.v1.trainer_mode
        with open_dict(config.trainer.v1):
            config.trainer.v1.trainer_mode = verls.get(mode, mode)
        self._times = StartupTimes()
        self._times.mark("tokenizer, data")
        self._server_import = Deferred("import-rollout-server")
        self._memory = _watch_memory()
        self._compares_log_probs = config.actor_rollout_ref.rollout.calculate_log_probs
        try:
            super().__init__(config)
        except BaseException:
            transfer_queue_start.start.forget()
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _PHASES:
            self._times.mark(_PHASES[name])
        if name == _WORKER_STARTED:
            transfer_queue_start.start.begin()
            self._server_import.begin()
        elif name in _WORKER_READY:
            self._finish_background()
        elif name == "logger":
            self._watch(value)

    def _setup(self) -> None:
        if self.config.actor_rollout_ref.rollout.name == "vllm":
            self._server_import.put_off(_import_server)
        try:
            super()._setup()
        except BaseException:
            transfer_queue_start.start.forget()
            self._server_import.forget()
            with contextlib.suppress(Exception):  # the error on its way up is the one to tell
                self._finish_background()
            raise
        self._finish_background()
        self._times.mark("rest of the model, first weight sync")

    def init(self) -> None:
        with told_again():
            super().init()
        self._times.mark("agent workers")

    def fit(self, agent_loop_manager: Any) -> None:
        self._times.mark(END)
        print(self._times.table(), flush=True)
        with told_again():
            super().fit(agent_loop_manager)

    def _build_replay_buffer(self) -> ReplayBuffer:
        """VERL's buffer, which looks for samples every POLL_SECONDS. A buffer class of the user's own is left alone."""
        buffer = super()._build_replay_buffer()
        if type(buffer) in (ReplayBuffer, ReplayBufferAsync):
            buffer.poll_interval = POLL_SECONDS
        return buffer

    def _compute_old_log_prob(self, batch, metrics: dict[str, Any]):
        """Add the gap between the log-probs of rollout and trainer to VERL's metrics.

        VERL itself logs the gap between probabilities, in which that of unlikely tokens cannot be seen.
        """
        batch = super()._compute_old_log_prob(batch, metrics)
        correction = self.config.algorithm.get("rollout_correction") or {}
        if self._compares_log_probs and not correction.get("bypass_mode", False):
            try:
                metrics.update(_gap_of(batch))
            except Exception:
                self._compares_log_probs = False
                log.warning("the log-prob gap is no longer measured; training goes on", exc_info=True)
        return batch

    def _finish_background(self) -> None:
        try:
            transfer_queue_start.start.finish()
        finally:
            self._server_import.finish()

    def _watch(self, logger: Any) -> None:
        config = cast(dict[str, Any], OmegaConf.to_container(self.config, resolve=True))
        monitoring.attach(logger, config, watch=self._memory, startup_s=self._times.phases_s())


@register_trainer(TRAINERS["sync"])
class MegaTrainSync(RunOfOurs, PPOTrainerSync):
    """VERL's synchronous trainer: generate, train and sync weights, one after the other."""


@register_trainer(TRAINERS["colocate_async"])
class MegaTrainColocateAsync(RunOfOurs, PPOTrainerColocateAsync):
    """VERL's colocated asynchronous trainer: the same order, but an answer may go on over a weight sync."""


def log_prob_gap(rollout: Tensor, trainer: Tensor, mask: Tensor) -> dict[str, float]:
    """The mean and the largest |log-prob by the rollout - log-prob by the trainer| over response tokens, in nats.

    All three are (B, T): rows, tokens of a response. mask: 1 at response tokens. Empty if the mask is all 0.
    """
    gap = torch.masked_select((rollout.float() - trainer.float()).abs(), mask.bool())
    if not gap.numel():
        return {}
    return {
        "megatrain/rollout_log_prob_gap_mean": gap.mean().item(),
        "megatrain/rollout_log_prob_gap_max": gap.max().item(),
    }


def _gap_of(batch) -> dict[str, float]:
    fields = ["rollout_log_probs", "old_log_probs", "response_mask"]
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    rows = data.to_padded_tensor()
    return log_prob_gap(rows["rollout_log_probs"], rows["old_log_probs"], rows["response_mask"])


def _watch_memory() -> MemoryWatch | None:
    """Begin to sample memory, before VERL makes its logger: that is the last thing it makes. None after an error."""
    try:
        return monitoring.watch_memory()
    except Exception:
        log.warning("memory is not watched before the first step; training goes on", exc_info=True)
        return None


def _import_server() -> None:
    with contextlib.suppress(Exception):  # VERL's own import of it fails again later, and that error is raised
        importlib.import_module(_SERVER)
