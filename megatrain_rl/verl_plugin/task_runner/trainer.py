"""Subclasses of VERL's trainers. Training itself is VERL's; a run of ours gains these things around it:

- Two parts of the start-up go on while the task runner waits for another, and the phases are timed.
- Memory is sampled from the start, and the logger is watched (monitoring.py).
- Samples are taken soon after they are ready.
- A batch that gets one update has no pass for old log-probs (on_policy.py).
- What a step asked for and did not get is counted (lost.py), and some errors are raised in plain words (failures.py).

VERL finds the subclasses in its own registry under the names in `verl_patches.ours.TRAINERS`, which the driver puts in
the place of VERL's (driver/prepare.py). To everything else the run's mode is VERL's, `sync` or `colocate_async`
(verl_patches/trainer_mode.py). A trainer of a user's own gets the same by RunOfOurs before VERL's class.
"""

import contextlib
import importlib
import logging
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSync, register_trainer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from megatrain_rl.verl_plugin import monitoring, on_policy
from megatrain_rl.verl_plugin.startup_times import END, StartupTimes
from megatrain_rl.verl_plugin.task_runner.failures import told_again
from megatrain_rl.verl_plugin.task_runner.lost import EVICTED_PROMPTS, Lost, check_lengths, check_rows
from megatrain_rl.watch.memory import MemoryWatch
from verl_patches import transfer_queue_start
from verl_patches.deferred import Deferred
from verl_patches.ours import TRAINERS, note_trainer

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
    "reward_loop_manager": "rollout engine",
    "llm_server_manager": "rest of the model, checkpoint",
}


class RunOfOurs(_Trainer):
    """A mixin that stands before a trainer of VERL's and adds to it, as the module's docstring says.

    Every process of a run first imports for 10 to 20 s, and VERL's task runner waits for each in turn. Here two of
    these waits take place while the task runner waits for the trainer's process:

    - the start of TransferQueue (verl_patches/transfer_queue_start.py);
    - the import of the rollout server's class, and with it all of vLLM, which VERL needs only later, to hand the class
      to Ray.
    """

    def __init__(self, config: DictConfig):
        note_trainer()
        self._times = StartupTimes()
        self._times.mark("tokenizer, data")
        self._server_import = Deferred("import-rollout-server")
        self._memory = _watch_memory()
        self._lost = Lost(config)
        self._of_update: dict[str, Any] | None = None  # what the update of this step computes in place of VERL's pass
        try:
            super().__init__(config)
        except BaseException:
            transfer_queue_start.start.forget()
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _PHASES:
            self._times.mark(_PHASES[name])
        if name == "actor_rollout_wg":
            self._worker_started(value)
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

    def _init_dataloader(self) -> None:
        try:
            super()._init_dataloader()
        finally:  # a loader cannot be made of nothing, and its error does not say what is missing
            check_rows(getattr(self, "train_dataset", None), getattr(self, "val_dataset", None), self.config)
        check_lengths(self.train_dataset, self.config, "data.train_files")
        check_lengths(self.val_dataset, self.config, "data.val_files")

    def _build_replay_buffer(self) -> ReplayBuffer:
        """VERL's buffer, which looks for samples every POLL_SECONDS. A buffer class of the user's own is left alone."""
        buffer = super()._build_replay_buffer()
        if type(buffer) in (ReplayBuffer, ReplayBufferAsync):
            buffer.poll_interval = POLL_SECONDS
            buffer.refill_fn = self._refill
        return buffer

    def _refill(self, num_prompts: int) -> int:
        self._lost.refill(num_prompts)
        return self._add_prompts_to_generate(num_prompts)

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """VERL calls this with each sample, before it adds rows of padding."""
        prompts = self.config.data.train_batch_size // self.parameter_sync_step
        prompts += metrics.get(EVICTED_PROMPTS, 0)
        metrics.update(self._lost.answers(batch.keys, batch.tags, prompts))
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Left out where the update's own log-probs are the old ones (on_policy.py).

        A trainer of a user's own keeps it: one of its methods may read old log-probs before the update.
        """
        of_ours = type(self) in (MegaTrainSync, MegaTrainColocateAsync)
        if of_ours and on_policy.one_update(self.config, len(batch)):
            self._of_update = on_policy.wanted(self.config)
            return batch
        self._of_update = None
        return super()._compute_old_log_prob(batch, metrics)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """VERL computes metrics of the rollout correction here, for which the old log-probs are not there yet."""
        without = on_policy.without_correction(self.config) if self._of_update else contextlib.nullcontext()
        with without:
            return super()._compute_advantage(batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self._of_update:
            batch.extra_info[on_policy.KEY] = self._of_update
        batch = super()._update_actor(batch, metrics)
        on_policy.rename(metrics)
        return batch

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: Any,
        sample_turns: Any,
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        """VERL calls this at the end of a validation, with one uid for each answer that has a reward."""
        metrics = super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts=expected_acc_counts
        )
        return metrics | self._lost.validation(expected_acc_counts, len(sample_uids))

    def _worker_started(self, group: Any) -> None:
        """Begin what goes on beneath VERL's wait for the trainer's process, which has been started.

        group: VERL's handle on the process. Its `init_model` is that wait, and is made to end what was begun here.
        """
        transfer_queue_start.start.begin()
        self._server_import.begin()
        init_model = group.init_model

        def wait_for_it(*args: Any, **kwargs: Any) -> Any:
            result = init_model(*args, **kwargs)
            self._times.mark("reward workers")
            self._finish_background()
            return result

        group.init_model = wait_for_it

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
