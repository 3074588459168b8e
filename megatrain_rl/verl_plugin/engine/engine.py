"""MegaTrainEngine is VERL's BaseEngine on a StreamTrainer. VERL finds it as strategy "megatrain", on cuda and cpu.

Invariants: the one process is the one data-parallel rank; weights, gradients and optimizer state never move (`to` does
nothing); within `disable_adapter()` log-probs are those of the frozen reference. VERL calls the engine from one thread.
"""

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Literal

import ray
import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.py_functional import append_to_dict
from verl.workers.config import EngineConfig, HFModelConfig, OptimizerConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from megatrain_rl.batch import PackedBatch
from megatrain_rl.config import StreamConfig
from megatrain_rl.host.machine import usable_cores
from megatrain_rl.trainer import StreamTrainer
from megatrain_rl.verl_plugin import on_policy, supported
from megatrain_rl.verl_plugin.config import REFERENCE_MARKER, MegaTrainEngineConfig, adamw_config, lr_schedule
from megatrain_rl.verl_plugin.engine import batch, checkpoint, loading, process_group
from megatrain_rl.verl_plugin.engine.loss import LossFunction, VerlObjective, predict_mask
from megatrain_rl.verl_plugin.engine.step_settings import StepSettings
from megatrain_rl.verl_plugin.engine.weight_sync import stream_weights
from verl_patches import ours

logger = logging.getLogger(__name__)

# VERL's default. Without our engine config (strategy set on model_engine=dp) the run's own size is unknown here.
_DEFAULT_BUCKET_MEGABYTES = 2048


class _EngineMode(BaseEngineCtx):
    """Train or eval mode. Modes nest: leaving the inner one restores the outer. Leaving train mode drops gradients."""

    engine: "MegaTrainEngine"

    def __enter__(self) -> None:
        self._outer = self.engine.mode
        super().__enter__()

    def __exit__(self, exc_type, exc_value, traceback) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or exc_type is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(exc_type, exc_value, traceback)
        self.engine.mode = self._outer


@EngineRegistry.register(model_type="language_model", backend="megatrain", device=["cuda", "cpu"])
class MegaTrainEngine(BaseEngine):
    """A StreamTrainer behind VERL's interface; its methods run in the order in which VERL calls them."""

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: EngineConfig,
        optimizer_config: OptimizerConfig | None,
        checkpoint_config: CheckpointConfig | None = None,
        **kwargs: Any,
    ):
        super().__init__()
        checkpoint_config = checkpoint_config or CheckpointConfig()
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = None if engine_config.forward_only else optimizer_config
        self.mode: str | None = None
        self._loading: Future[StreamTrainer] | None = None
        self._sync_wait_s = 0.0
        self._skipped_steps = 0
        self._step_follows = False
        self._weights: Literal["policy", "reference"] = "policy"
        supported.check_engine(
            model=model_config,
            engine=engine_config,
            optim=self.optimizer_config,
            world_size=torch.distributed.get_world_size(),
            load_contents=list(checkpoint_config.load_contents),
            async_save=checkpoint_config.async_save,
        )
        process_group.without_nccl()
        ours.note_engine()

    # ---- facts VERL asks for before initialize() ----

    is_param_offload_enabled = False
    is_optimizer_offload_enabled = False

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup:
        # a group and not None: without one VERL's worker hands on metrics in a shape that it cannot flatten
        world = torch.distributed.group.WORLD
        assert world is not None, "VERL opens the process group before it builds an engine"
        return world

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move nothing: state lives in host RAM, and the GPU holds only what the budget allows."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)

    # ---- life cycle ----

    def initialize(self) -> None:
        """Take the GPU memory and begin to load the model; see loading.py. In SFT return when it is loaded.

        The reference is read here from the model's files, before any checkpoint is loaded.
        """
        config, model_dir = self._stream_config(), self.model_config.local_path
        assert model_dir is not None, "VERL's model config has fetched the model"
        # Ray sets OMP_NUM_THREADS=1 in its workers
        torch.set_num_threads(config.cpu_threads or usable_cores())
        optim = self.optimizer_config
        self._loading = loading.load(
            model_dir,
            check=self._check_bucket_fits,
            config=config,
            adamw=None if optim is None else adamw_config(optim),
            schedule=None if optim is None else lr_schedule(optim),
            device=get_device_name(),
            reference=self._keeps_reference(),
            hf_config=self.model_config.hf_config,
        )
        if not ray.is_initialized():
            # SFT: no rollout engine starts meanwhile, and VERL's DataLoader forks from this very process. It must not
            # while a thread loads and compiles: a child gets the locks that such threads hold, and nobody opens them.
            self._loading.result()

    @property
    def trainer(self) -> StreamTrainer:
        """The trainer, once it is loaded: the call waits for that. An error of loading is raised here."""
        assert self._loading is not None, "initialize() comes first"
        return self._loading.result()

    def _check_bucket_fits(self, trainer: StreamTrainer) -> None:
        """Raise a ValueError if the GPU budget does not hold VERL's transfer bucket beside the idle trainer.

        The bucket is allocated in this process, and so inside the budget, while the trainer is idle.
        """
        if get_device_name() != "cuda" or trainer.adamw is None:
            return
        plan, spec, config = trainer.plan, trainer.spec, trainer.config
        bucket = self._bucket_bytes() or _DEFAULT_BUCKET_MEGABYTES << 20
        largest = spec.vocab_size * spec.hidden_size * config.param_torch_dtype.itemsize
        needed = plan.idle_bytes + bucket + (largest if largest > bucket else 0)
        if needed > plan.gpu_cap_bytes:
            raise ValueError(
                f"gpu_budget_gb={config.gpu_budget_gb:g} holds the trainer but not the weight transfer beside it: "
                f"raise it by {(needed - plan.gpu_cap_bytes) / 1e9:.1f} or lower "
                "rollout.checkpoint_engine.update_weights_bucket_megabytes"
            )

    def _bucket_bytes(self) -> int:
        """The size of VERL's transfer bucket, or 0 if it is not known here."""
        if isinstance(self.engine_config, MegaTrainEngineConfig):
            return self.engine_config.sync_bucket_megabytes << 20
        return 0

    def _stream_config(self) -> StreamConfig:
        if isinstance(self.engine_config, MegaTrainEngineConfig):
            return self.engine_config.stream_config_here()
        return StreamConfig()

    def _keeps_reference(self) -> bool:
        """Whether this engine also serves as the frozen reference: see configs/megatrain_extra, driver/prepare.py."""
        config = self.engine_config
        if config.forward_only or self.model_config.lora_adapter_path != REFERENCE_MARKER:
            return False
        if isinstance(config, MegaTrainEngineConfig):
            return config.reference_for_kl_loss or config.reference_for_kl_in_reward
        return True  # driver/prepare.py has set the marker, which it does only if a KL term needs the reference

    def train_mode(self, **kwargs: Any) -> _EngineMode:
        return _EngineMode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> _EngineMode:
        return _EngineMode(self, "eval", **kwargs)

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Within, log-probs are the reference's: the same pipeline reads the frozen weights.

        VERL calls this for reference log-probs, as it does with LoRA. A ValueError if the engine keeps no reference.
        """
        if not self._keeps_reference():
            raise ValueError(
                "reference log-probs were asked of an engine without a reference: set "
                "actor_rollout_ref.actor.use_kl_loss=true or algorithm.use_kl_in_reward=true"
            )
        self._weights = "reference"
        try:
            yield
        finally:
            self._weights = "policy"

    # ---- one step ----

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a whole mini-batch: packs, log-probs, VERL's loss and, unless forward only, gradients.

        Returns "loss", numbers whose sum is the mini-batch's; "metrics", those of one call of VERL's loss with the
        whole mini-batch; and "model_output", log_probs and perhaps entropy as jagged tensors in row order, empty in
        training unless the batch asks for it.
        """
        entropy, of_update = batch.flag(data, "calculate_entropy"), on_policy.asked(data)
        mini_batch = batch.read(data, predict=predict_mask(data, loss_function))
        max_tokens, max_sequences = self._pack_limits(data)
        packs = mini_batch.packs(
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            share_prompts=self.trainer.config.share_prompts,
            repeat_cost=self.trainer.plan.repeat_cost,
        )
        objective = None
        if loss_function is not None:
            objective = VerlObjective(
                loss_function, data, mini_batch, self.get_data_parallel_group(), entropy=entropy, old_is_own=of_update is not None
            )  # fmt: skip
        if forward_only:
            output, stats = self._infer(packs, objective, entropy)
        else:
            assert objective is not None, "VERL trains with a loss"
            output, stats = self._train(packs, objective, entropy or of_update is not None)
            if of_update is not None:
                output["metrics"] |= on_policy.metrics(mini_batch.model_output(stats, packs), data, of_update)
        output["model_output"] = {}
        if forward_only or batch.flag(data, "return_model_output"):
            output["model_output"] = mini_batch.model_output(stats, packs)
        return output

    def _pack_limits(self, data: TensorDict) -> tuple[int, int | None]:
        """The most tokens and sequences of a pack, by VERL's micro-batch settings and by what the trainer can hold."""
        if tu.get_non_tensor_data(data=data, key="force_group_size", default=1) > 1:
            raise ValueError("force_group_size > 1: strategy megatrain does not keep groups of rows in one micro-batch")
        if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            return min(data["max_token_len_per_gpu"], self.trainer.pack_tokens), None
        return self.trainer.pack_tokens, data["micro_batch_size_per_gpu"]

    def _infer(self, packs: list[PackedBatch], objective: VerlObjective | None, entropy: bool):
        stats = self.trainer.log_probs(packs, entropy=entropy, weights=self._weights)
        losses: list[float] = []
        metrics: dict[str, Any] = {}
        if objective is not None:
            result = objective.whole(stats, packs)
            losses.append(float(result.loss))
            append_to_dict(metrics, result.metrics)
        return {"loss": losses, "metrics": metrics}, stats

    def _train(self, packs: list[PackedBatch], objective: VerlObjective, entropy: bool):
        assert self._weights == "policy", "the reference is never trained"
        step_follows = self._step_follows
        if objective.separable:
            out = self.trainer.forward_backward(packs, objective, entropy=entropy, final=step_follows)
            result = objective.whole(out.stats, packs).metrics if any(out.metrics) else {}
        else:
            linearised = objective.linearised(self.trainer.log_probs(packs, entropy=entropy), packs)
            out = self.trainer.forward_backward(packs, linearised, entropy=entropy, final=step_follows)
            result = linearised.metrics
        metrics: dict[str, Any] = {}
        append_to_dict(metrics, result)
        return {"loss": list(out.losses), "metrics": metrics}, out.stats

    def train_batch(self, data: TensorDict, loss_function: LossFunction) -> dict[str, Any]:
        """VERL's train_batch, with three more metrics in RL, each counted since the start.

        skipped_steps: optimizer steps that were skipped because a loss or the gradient norm was not finite.
        optimizer_wait_s/max: seconds spent waiting for the host optimizer, wherever weights were read.
        weight_sync_wait_s/max: the part of these seconds that weight syncs waited.
        """
        self._step_follows = True  # BaseEngine.train_batch: zero_grad, forward_backward_batch, optimizer_step
        try:
            outputs = super().train_batch(data, loss_function)
        finally:
            self._step_follows = False
        if batch.has_responses(data):
            # RL flattens lists over ranks and mini-batches and names it actor/skipped_steps; SFT would log the list
            outputs["metrics"]["skipped_steps"] = [float(self._skipped_steps)]
            # with "max" in the name VERL logs the largest value of several mini-batches, which is the last
            outputs["metrics"]["optimizer_wait_s/max"] = [self.trainer.optimizer_wait_s]
            outputs["metrics"]["weight_sync_wait_s/max"] = [self._sync_wait_s]
        return outputs

    @property
    def optimizer(self) -> StepSettings:
        """What VERL's Tinker worker sets before a step: the learning rate, and nothing else."""
        return StepSettings(self.trainer)

    def optimizer_zero_grad(self) -> None:
        self.trainer.zero_grad()

    def optimizer_step(self) -> float:
        """Apply the gradients; returns their norm before clipping."""
        result = self.trainer.optim_step()
        self._skipped_steps = result.skipped_steps
        if not result.stepped:
            logger.warning("optimizer step skipped: the loss or the gradient norm (%s) is not finite", result.grad_norm)
        return result.grad_norm

    def lr_scheduler_step(self) -> float:
        """Count a step of VERL's; the learning rate of the next one."""
        self.trainer.schedule.step()
        return self.trainer.lr

    # ---- weights out, checkpoints ----

    def get_per_tensor_param(self, **kwargs: Any):
        """An iterator over (name, tensor) of every parameter for the rollout engine, and None: there is no adapter."""
        return self._weights_out(), None

    def _weights_out(self):
        waited_s = self.trainer.optimizer_wait_s
        try:
            yield from stream_weights(self.trainer, device=get_device_name(), bucket_bytes=self._bucket_bytes())
        finally:
            self._sync_wait_s += self.trainer.optimizer_wait_s - waited_s

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        if hdfs_path is not None:
            raise ValueError(f"trainer.default_hdfs_dir ({hdfs_path}): set it to null, copy trainer.default_local_dir")
        checkpoint.make_room(local_path, max_ckpt_to_keep)
        model = self.model_config
        self.trainer.save_checkpoint(local_path, tokenizer=model.tokenizer, generation_config=model.generation_config)
        checkpoint.remove_oldest(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Load the checkpoint at `local_path`, if that is given.

        `del_local_after_load` is ignored: it is about copies of remote files, of which there are none.
        """
        if local_path is not None:
            self.trainer.load_checkpoint(checkpoint.require(local_path))
