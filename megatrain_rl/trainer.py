"""StreamTrainer: the front door. Weights and optimizer state in host RAM, one layer at a time on the device.

    trainer = StreamTrainer.from_pretrained(model_dir, config=StreamConfig(), adamw=AdamWConfig(lr=1e-6), device="cuda")
    packs = pack_sequences(sequences, max_tokens=trainer.pack_tokens)
    trainer.forward_backward(packs, NegativeLogLikelihood(packs))
    trainer.optim_step()

Not thread-safe: one caller at a time. The host optimizer has a thread of its own; readers of weights wait for it.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatrain_rl.batch import PackedBatch
from megatrain_rl.checkpoint import training_state
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.host.lifetime import Lifetime
from megatrain_rl.host.machine import optimizer_threads
from megatrain_rl.host.pinned import place_memory, where_memory_lies
from megatrain_rl.host.store import HostStore, WeightStore, frozen_store
from megatrain_rl.model.decoder import DecoderSpec, decoder_spec
from megatrain_rl.model.folder import check_folder
from megatrain_rl.model.hf_export import Companions, Saveable
from megatrain_rl.model.hf_io import CheckpointReader
from megatrain_rl.objectives import Objective, TokenStats
from megatrain_rl.optim.host_adamw import HostAdamW, Interval, make_library
from megatrain_rl.optim.library import LibraryAdamW
from megatrain_rl.optim.lr_schedule import LRSchedule
from megatrain_rl.optim.masters import draw_masters, read_masters, write_masters
from megatrain_rl.optim.update import OptimStepResult, Update
from megatrain_rl.planner import make_plan
from megatrain_rl.streaming.executor import StreamExecutor
from megatrain_rl.streaming.head_pass import ForwardBackwardOutput
from megatrain_rl.streaming.warm_up import warm_up

log = logging.getLogger(__name__)


class StreamTrainer:
    """Built by `from_pretrained` or `from_config`."""

    def __init__(
        self,
        spec: DecoderSpec,
        config: StreamConfig,
        adamw: AdamWConfig | None,
        schedule: LRSchedule | None,
        device: torch.device,
        *,
        reference: bool,
        on_reserved: Callable[["StreamTrainer"], None] | None = None,
    ):
        # What can refuse comes first: the plan, the optimizer's and the attention's needs. Then memory, largest last.
        self.spec = spec
        self.config = config
        self.adamw = adamw
        self.schedule = schedule or LRSchedule()
        self.plan = make_plan(spec, config, adamw, reference=reference)
        library = None if adamw is None else make_library(config, adamw)
        place_memory(config.host_numa)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._pin = device.type == "cuda"
        self._executor = StreamExecutor(spec, config, self.plan, device)
        for line in (f"streaming {spec.num_parameters / 1e9:.2f} B parameters", *self.plan.table()):
            log.info(line)
        self._reference: WeightStore | None = None
        self._companions = Companions()
        self._update: Update | None = None  # forward only
        self._life = Lifetime()
        with self._closed_on_error():
            if on_reserved is not None:
                on_reserved(self)
            self._store = HostStore(spec, config.param_torch_dtype, pin=self._pin)
            self._life.add(self._store.close)
            if adamw is not None:
                self._prepare_training(adamw, library)
        if lies := where_memory_lies():  # every page has been touched
            log.info(lies)

    def _prepare_training(self, adamw: AdamWConfig, library: LibraryAdamW | None) -> None:
        spec, config = self.spec, self.config
        gradients = HostGradients(spec, config.grad_torch_dtype, pin=self._pin)
        self._life.add(gradients.close)
        optimizer = HostAdamW(
            spec, self._store, gradients, adamw, library,
            state_dtype=config.optimizer_state_torch_dtype, threads=config.cpu_threads or optimizer_threads(),
        )  # fmt: skip
        self._life.add(optimizer.close)
        self._update = Update(spec, gradients, optimizer, adamw, overlap=config.overlap_optimizer)
        self._executor.enable_training(gradients, on_landed=self._update.landed)

    @classmethod
    def from_pretrained(
        cls,
        model_dir: str | Path,
        *,
        config: StreamConfig,
        adamw: AdamWConfig | None,
        schedule: LRSchedule | None = None,
        device: str | torch.device = "cuda",
        reference: bool = False,
        hf_config: PretrainedConfig | None = None,
        on_reserved: Callable[["StreamTrainer"], None] | None = None,
    ) -> "StreamTrainer":
        """Load a Hugging Face checkpoint directory straight into host RAM.

        adamw: None for a forward-only trainer without gradients or optimizer state.
        reference: keep the weights of `model_dir` readable as `weights="reference"`, whatever happens to the policy.
        hf_config: takes the place of config.json.
        on_reserved: called with the trainer when its plan is made and its GPU memory taken, before host memory is.
        """
        reader = CheckpointReader(model_dir)
        spec = decoder_spec(hf_config or reader.config())
        check_folder(spec, reader)
        trainer = cls(spec, config, adamw, schedule, torch.device(device), reference=reference, on_reserved=on_reserved)
        trainer._companions = Companions.read(reader.directory)
        with trainer._closed_on_error():
            read_masters(trainer._store, trainer._optimizer, reader)
            if reference:
                trainer._reference = frozen_store(spec, reader, config, pin=trainer._pin)
                trainer._life.add(trainer._reference.close)
        return trainer

    @classmethod
    def from_config(
        cls,
        hf_config: PretrainedConfig,
        *,
        config: StreamConfig,
        adamw: AdamWConfig | None,
        schedule: LRSchedule | None = None,
        device: str | torch.device = "cuda",
        seed: int = 0,
    ) -> "StreamTrainer":
        """A trainer with random weights; see `optim.masters.draw_masters`."""
        trainer = cls(decoder_spec(hf_config), config, adamw, schedule, torch.device(device), reference=False)
        with trainer._closed_on_error():
            trainer._executor.use_reservation()
            std = hf_config.initializer_range
            draw_masters(trainer._store, trainer._optimizer, std=std, seed=seed, device=device)
        return trainer

    @property
    def pack_tokens(self) -> int:
        """Most tokens of a pack: the setting, or what the budget holds."""
        return self.plan.pack_tokens

    def warm_up(self) -> None:
        """Do now what the first step would do beside its work: compile layers and head, load kernels. No state changes.

        The gradient of an entropy, if the objective has one, is still compiled when it first comes.
        """
        train = self._update is not None and self._update.idle
        warm_up(self, train=train, on_gpu=self._device.type == "cuda")

    def forward_backward(
        self, packs: Sequence[PackedBatch], objective: Objective, *, entropy: bool = False, final: bool = False
    ) -> ForwardBackwardOutput:
        """Forward and backward of a mini-batch. Gradients are summed over packs and over calls until `optim_step`.
        Packs whose layer inputs do not fit host RAM together run in several sweeps, one after the other. A non-finite
        loss stops before backward: this call adds no gradient and the next `optim_step` skips.

        entropy: hand entropies to the objective too.
        final: a promise that the next call is `optim_step` (or `zero_grad`), so that the update may start beneath
            backward, at the learning rate of now. When it does, and with which result, is told in `optim.update`.
        """
        update = self._require_training()
        self._require_settled()
        sweeps = self._executor.sweeps(packs, self.plan, train=True)
        outputs = []
        if final:
            update.promise()
        try:
            for i, sweep in enumerate(sweeps):
                last = i == len(sweeps) - 1
                output = self._executor.forward_backward(
                    sweep, self._store, objective, entropy=entropy,
                    before_backward=(lambda: update.guess(lr=self.lr)) if last else None,
                )  # fmt: skip
                update.nonfinite_loss |= output.nonfinite_loss
                outputs.append(output)
        except BaseException:
            self._drop_gradients()  # some blocks have this sweep's part and some have not
            raise
        return ForwardBackwardOutput.joined(outputs)

    def log_probs(
        self, packs: Sequence[PackedBatch], *, entropy: bool = False, weights: Literal["policy", "reference"] = "policy"
    ) -> list[TokenStats]:
        """Per-token statistics of each pack, on the CPU, under the policy or the frozen reference."""
        self._require_settled()
        if weights == "reference" and self._reference is None:
            raise ValueError("no reference weights are kept; build the trainer with reference=True")
        store = self._store if weights == "policy" else self._reference
        sweeps = self._executor.sweeps(packs, self.plan, train=False)
        return [stats for sweep in sweeps for stats in self._executor.log_probs(sweep, store, entropy=entropy)]

    def num_sweeps(self, packs: Sequence[PackedBatch], *, train: bool) -> int:
        """How many sweeps these packs take: several when their layer inputs do not fit host RAM together."""
        return len(self._executor.sweeps(packs, self.plan, train=train))

    @property
    def lr(self) -> float:
        """Learning rate of the next `optim_step`: `AdamWConfig.lr` times the schedule's factor."""
        if self.adamw is None:
            raise ValueError("a forward-only trainer (adamw=None) has no learning rate")
        return self.adamw.lr * self.schedule.factor

    def optimizer_intervals(self) -> list[Interval]:
        """When the host optimizer worked on which block, latest last, at most 4096."""
        return list(self._require_training().optimizer.intervals)

    @property
    def optimizer_wait_s(self) -> float:
        """Seconds that whoever wanted weights has waited for the host optimizer since the start."""
        return 0.0 if self._update is None else self._store.waited_s + self._update.optimizer.waited_s

    def zero_grad(self) -> None:
        """Drop the gradients; an update that began beneath backward is taken back."""
        update = self._require_training()
        self._executor.drain()
        update.take_back()

    def optim_step(self) -> OptimStepResult:
        """Clip and apply the gradients at the current learning rate; gradients are gone afterwards.

        Returns as soon as the norm is known; blocks are stepped in the background, and who reads one waits for it.
        """
        update = self._require_training()
        self._executor.drain()
        return update.end(lr=self.lr)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, host tensor) in forward order, a tied output matrix once. Waits for each block in turn.

        Views of live memory: valid until the next update begins, in `optim_step` or `forward_backward(final=True)`.
        """
        self._require_settled()
        return ((b.names[name], self._store.view(b, name)) for b in self.spec.blocks for name in b.layout.slots)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, host tensor) of the gradients summed so far; a ValueError when there are none."""
        gradients = self._require_training().gradients
        self._executor.drain()
        if not gradients.complete:
            raise ValueError("no gradients: call forward_backward first")
        yield from gradients.named()

    def load_named_parameters(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights by Hugging Face name; fp32 values are kept exactly (the residual follows). Moments stay.

        A ValueError, before anything changes, for what `write_masters` refuses, and while gradients wait for an update.
        """
        self._wait_for_optimizer()
        if self._update is not None:
            self._executor.drain()
            self._update.require_no_gradients("load_named_parameters")
        write_masters(self._store, self._optimizer, tensors)

    def save_checkpoint(
        self, directory: str | Path, *, tokenizer: Saveable | None = None, generation_config: Saveable | None = None
    ) -> None:
        """Write the complete state; `megatrain_rl.checkpoint` says what is written and what is never overwritten.

        tokenizer, generation_config: saved with the weights; None writes the files of the model's folder.
        """
        self._wait_for_optimizer()
        companions = replace(self._companions, tokenizer=tokenizer, generation_config=generation_config)
        state: dict[str, Any] = {"skipped_steps": 0}
        if self._update is not None:
            state = self._update.state_dict() | {"schedule": self.schedule.state_dict()}
        training_state.save(Path(directory), self.spec, self._store, self._optimizer, state, companions)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Restore the complete state, also after a failed update. Gradients are dropped; the reference stays. A
        ValueError before anything changes if the checkpoint is not whole."""
        self._life.require_open()
        checked = training_state.check(Path(directory), self.spec, self._store, self._optimizer)
        if self._update is not None:
            self._drop_gradients()
            self._update.optimizer.settle()
        state = checked.restore(self._store, self._optimizer)
        if self._update is not None:
            self._update.load_state_dict(state)
            self.schedule.load_state_dict(state["schedule"])

    def synchronize(self) -> None:
        """Wait until gradients have landed and the optimizer is done."""
        self._executor.drain()
        self._wait_for_optimizer()

    def close(self) -> None:
        """Stop the threads and give the host memory back, also after an error. A second call does nothing."""
        self._life.close(first=self._executor.close)

    # ---- inside ----

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the error on its way up is the one to tell
                self.close()
            raise

    @property
    def _optimizer(self) -> HostAdamW | None:
        return None if self._update is None else self._update.optimizer

    def _drop_gradients(self) -> None:
        """After a failure: nothing that was summed so far may reach an update."""
        with contextlib.suppress(RuntimeError):  # the error that is on its way up is the one to tell
            self._executor.drain()
        self._require_training().take_back()

    def _require_training(self) -> Update:
        self._life.require_open()
        if self._update is None:
            raise ValueError("this trainer is forward only (adamw=None)")
        return self._update

    def _require_settled(self) -> None:
        self._life.require_open()
        if self._update is not None and self._update.pending:
            raise ValueError(
                "forward_backward(final=True) promised an update: call optim_step, or zero_grad to drop it"
            )

    def _wait_for_optimizer(self) -> None:
        self._require_settled()
        if self._update is not None:
            self._update.optimizer.wait()
