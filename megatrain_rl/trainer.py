"""StreamTrainer: the front door. Weights and optimizer state in host RAM, one layer at a time on the device.

    trainer = StreamTrainer.from_pretrained(model_dir, config=StreamConfig(), adamw=AdamWConfig(lr=1e-6), device="cuda")
    packs = pack_sequences(sequences, max_tokens=trainer.pack_tokens)
    trainer.forward_backward(packs, NegativeLogLikelihood(packs))
    trainer.optim_step()

Not thread-safe: one caller at a time. The host optimizer runs on a thread of its own; every reader of weights waits for it.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatrain_rl import checkpoint
from megatrain_rl.batch import PackedBatch, pack_sequences
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.host.machine import usable_cores
from megatrain_rl.host.store import (
    HostStore,
    MappedStore,
    WeightStore,
    check_shape,
    check_shapes,
    copy_rounded,
    fill_from_checkpoint,
)
from megatrain_rl.model.decoder import Block, DecoderSpec, decoder_spec
from megatrain_rl.model.hf_io import CheckpointReader
from megatrain_rl.objectives import NegativeLogLikelihood, Objective, TokenStats
from megatrain_rl.ops.adamw import split_master
from megatrain_rl.optim.host_adamw import HostAdamW, Interval, make_library
from megatrain_rl.optim.library import LibraryAdamW
from megatrain_rl.optim.lr_schedule import LRSchedule
from megatrain_rl.optim.speculation import SpeculationGate
from megatrain_rl.planner import PACK_MULTIPLE, check_packs, cut_sweeps, make_plan
from megatrain_rl.streaming.executor import ForwardBackwardOutput, StreamExecutor
from megatrain_rl.streaming.schedule import LayerSchedule

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OptimStepResult:
    """grad_norm: global L2 norm before clipping. stepped: False when the norm or a loss was not finite; nothing changed then.
    skipped_steps: such steps since the start. lr: what this step used."""

    grad_norm: float
    stepped: bool
    skipped_steps: int
    lr: float


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
        # Whatever can refuse comes first: the plan, the optimizer's and the attention's needs. Then memory, the largest last.
        self.spec = spec
        self.config = config
        self.adamw = adamw
        self.schedule = schedule
        self.plan = make_plan(spec, config, adamw, reference=reference)
        library = None if adamw is None else make_library(config, adamw)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._executor = StreamExecutor(spec, config, self.plan, device)
        log.info(
            "streaming %.2f B parameters: packs of %d tokens, longest sequence %d, %.1f GB of host RAM",
            spec.num_parameters / 1e9,
            self.plan.pack_tokens,
            self.plan.max_pack_tokens,
            self.plan.host_bytes / 1e9,
        )
        self._store: HostStore | None = None
        self._reference: WeightStore | None = None
        self._companions: Path | None = None
        self._gradients: HostGradients | None = None
        self._optimizer: HostAdamW | None = None
        self._nonfinite_loss = False
        self._step_promised = False
        self._skipped_steps = 0
        self._closed = False
        with self._closed_on_error():
            if on_reserved is not None:
                on_reserved(self)
            self._take_host_memory(library, schedule)

    def _take_host_memory(self, library: LibraryAdamW | None, schedule: LRSchedule | None) -> None:
        spec, config, pin = self.spec, self.config, self._device.type == "cuda"
        self._store = HostStore(spec, config.param_torch_dtype, pin=pin)
        if self.adamw is None:
            return
        self.schedule = schedule or LRSchedule(base_lr=self.adamw.lr)
        self._gradients = HostGradients(spec, config.grad_torch_dtype, pin=pin)
        self._optimizer = HostAdamW(
            spec, self._store, self._gradients, self.adamw, library,
            state_dtype=config.optimizer_state_torch_dtype, threads=config.cpu_threads or optimizer_threads(),
        )  # fmt: skip
        self._executor.enable_training(self._gradients, on_landed=self._optimizer.offer)
        self._gate = SpeculationGate(self.adamw.clip_grad)

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

        adamw: None for a forward-only trainer without gradients or optimizer state. reference: keep the weights of `model_dir`
        readable as `weights="reference"`, whatever is trained or loaded later. hf_config: takes the place of config.json. on_reserved:
        called with the trainer, whose plan is made and whose GPU memory is taken, before host memory is and the weights are read.
        """
        reader = CheckpointReader(model_dir)
        spec = decoder_spec(hf_config or reader.config())
        check_shapes(spec, reader)
        trainer = cls(spec, config, adamw, schedule, torch.device(device), reference=reference, on_reserved=on_reserved)
        trainer._companions = reader.directory
        with trainer._closed_on_error():
            for block in spec.blocks:
                for name in block.layout.slots:
                    trainer._set(block, name, reader.tensor(block.names[name]))
            if reference:
                trainer._reference = trainer._frozen_store(reader)
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
        """Random weights: matrices normal with the config's `initializer_range`, norm weights 1, biases 0. The numbers depend on
        the device they are drawn on."""
        trainer = cls(decoder_spec(hf_config), config, adamw, schedule, torch.device(device), reference=False)
        with trainer._closed_on_error():
            trainer._executor.use_reservation()
            generator = torch.Generator(device=device).manual_seed(seed)
            for block in trainer.spec.blocks:
                for name, slot in block.layout.slots.items():
                    if len(slot.shape) == 2:
                        draw = torch.empty(slot.shape, dtype=config.param_torch_dtype, device=device)
                        tensor = draw.normal_(std=hf_config.initializer_range, generator=generator).cpu()
                    else:
                        tensor = torch.zeros(slot.shape) if name.endswith("bias") else torch.ones(slot.shape)
                    trainer._set(block, name, tensor)
        return trainer

    @property
    def pack_tokens(self) -> int:
        """Most tokens of a pack: the setting, or what the budget holds."""
        return self.plan.pack_tokens

    def warm_up(self) -> None:
        """Do now what the first step would do beside its work: compile layers and head, load kernels; but the gradient of an entropy, if the
        objective has one, is compiled when it first comes. Weights, gradients and optimizer state stay as they are."""
        # On a GPU a whole pack: what is compiled is tuned for the size that it is first called with.
        tokens = self.pack_tokens if self._device.type == "cuda" else min(self.pack_tokens, PACK_MULTIPLE)
        lengths = [max(1, tokens // 2), max(1, tokens // 3)]
        packs = pack_sequences([torch.zeros(n, dtype=torch.long) for n in lengths], max_tokens=self.pack_tokens)
        for entropy in (False, True):
            self.log_probs(packs, entropy=entropy)
        if self._optimizer is not None and not (self._gradients.complete or self._nonfinite_loss):
            self.forward_backward(packs, NegativeLogLikelihood(packs))
            self.zero_grad()

    def forward_backward(
        self, packs: Sequence[PackedBatch], objective: Objective, *, entropy: bool = False, final: bool = False
    ) -> ForwardBackwardOutput:
        """Forward and backward of a mini-batch. Gradients are summed over packs and over calls until `optim_step`. Packs whose layer
        inputs do not fit host RAM together run in several sweeps, one after the other.

        entropy: hand entropies to the objective too. A non-finite loss stops before backward: this call adds no gradient and the
        next `optim_step` skips.
        final: a promise that the next call is `optim_step` (or `zero_grad`): the optimizer may start on blocks whose gradients are
        complete while backward goes on, at the learning rate of now. It does so when recent norms were well below the clip limit;
        the result is that of a step after backward, to the bit unless this norm turns out above the limit, and to fp32 rounding then.
        """
        self._require_training()
        self._require_settled()
        merged = ForwardBackwardOutput(losses=[], metrics=[], stats=[], nonfinite_loss=False)
        sweeps = self._sweeps(packs, train=True)
        for i, sweep in enumerate(sweeps):
            bad = self._nonfinite_loss or merged.nonfinite_loss
            last = final and i == len(sweeps) - 1
            speculate = last and not bad and self._may_speculate()
            try:
                out = self._executor.forward_backward(
                    sweep, self._store, objective, entropy=entropy,
                    before_backward=self._open_update if speculate else _nothing,
                )  # fmt: skip
            except BaseException:
                self._drop_gradients()  # some blocks have this sweep's part and some have not
                raise
            merged = ForwardBackwardOutput(
                losses=merged.losses + out.losses,
                metrics=merged.metrics + out.metrics,
                stats=merged.stats + out.stats,
                nonfinite_loss=merged.nonfinite_loss or out.nonfinite_loss,
            )
        self._nonfinite_loss |= merged.nonfinite_loss
        self._step_promised = final
        return merged

    def log_probs(
        self,
        packs: Sequence[PackedBatch],
        *,
        entropy: bool = False,
        weights: Literal["policy", "reference"] = "policy",
    ) -> list[TokenStats]:
        """Per-token statistics of each pack, on the CPU, under the policy or the frozen reference."""
        self._require_open()
        self._require_settled()
        if weights == "reference" and self._reference is None:
            raise ValueError("no reference weights are kept; build the trainer with reference=True")
        store = self._store if weights == "policy" else self._reference
        sweeps = self._sweeps(packs, train=False)
        return [stats for sweep in sweeps for stats in self._executor.log_probs(sweep, store, entropy=entropy)]

    def num_sweeps(self, packs: Sequence[PackedBatch], *, train: bool) -> int:
        """How many sweeps these packs take: more than one when their layer inputs do not fit host RAM together."""
        return len(self._sweeps(packs, train=train))

    def optimizer_intervals(self) -> list[Interval]:
        """When the host optimizer worked on which block, latest last, at most 4096."""
        self._require_training()
        return list(self._optimizer.intervals)

    @property
    def optimizer_wait_s(self) -> float:
        """Seconds that whoever wanted weights has waited for the host optimizer since the start."""
        return 0.0 if self._optimizer is None else self._store.waited_s + self._optimizer.waited_s

    def zero_grad(self) -> None:
        """Drop the gradients; an update that began beneath backward is taken back."""
        self._require_training()
        self._executor.drain()
        self._forget_gradients()

    def optim_step(self) -> OptimStepResult:
        """Clip and apply the gradients at the schedule's current learning rate; gradients are gone afterwards.

        Returns as soon as the norm is known; blocks are stepped in the background and each is waited for where it is read.
        """
        self._require_training()
        self._executor.drain()
        # After a failed sweep some blocks hold a gradient and others an old one; a non-finite loss skips the step anyway.
        if not self._nonfinite_loss and not self._gradients.complete:
            raise ValueError(
                "optim_step without complete gradients: call forward_backward first, and zero_grad after one that failed"
            )
        grad_norm = float("nan") if self._nonfinite_loss else self._gradients.norm()
        stepped = math.isfinite(grad_norm)
        open_lr = self._optimizer.open_lr
        lr = self.schedule.lr if open_lr is None else open_lr  # what an update that has begun uses
        if stepped:
            self._apply(lr, grad_norm)
        else:
            self._skipped_steps += 1
        self._forget_gradients()
        return OptimStepResult(grad_norm=grad_norm, stepped=stepped, skipped_steps=self._skipped_steps, lr=lr)

    def _apply(self, lr: float, grad_norm: float) -> None:
        # the factor of torch.nn.utils.clip_grad_norm_
        scale = min(1.0, self._gate.limit / (grad_norm + 1e-6))
        self._gate.saw(grad_norm)
        if self._optimizer.open_lr is not None:
            self._optimizer.confirm(grad_scale=scale)
        else:
            self._optimizer.start_step(lr=lr, grad_scale=scale)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, host tensor) in forward order, a tied output matrix once. Views of live memory: valid until the next
        update begins, in `optim_step` or in `forward_backward(final=True)`. Each block is waited for as it is reached."""
        self._require_open()
        self._require_settled()
        return ((b.names[name], self._store.view(b, name)) for b in self.spec.blocks for name in b.layout.slots)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, host tensor) of the gradients summed so far; a ValueError when there are none."""
        self._require_training()
        self._executor.drain()
        if not self._gradients.complete:
            raise ValueError("no gradients: call forward_backward first")
        for block in self.spec.blocks:
            for name in block.layout.slots:
                yield block.names[name], block.layout.view(self._gradients.flat(block), name)

    def load_named_parameters(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights by Hugging Face name; fp32 values are kept exactly (the residual follows). An unknown name or a wrong
        shape is a ValueError. Moments stay."""
        self._require_settled()
        self._wait_for_optimizer()
        places = {block.names[n]: (block, n) for block in self.spec.blocks for n in block.names}
        for full_name, tensor in tensors:
            if full_name not in places:
                raise ValueError(f"{full_name!r} is not a parameter of this model")
            self._set(*places[full_name], tensor)

    def save_checkpoint(self, directory: str | Path) -> None:
        """Write the complete state; see `megatrain_rl.checkpoint` for the layout."""
        self._require_settled()
        self._wait_for_optimizer()
        state = {"skipped_steps": self._skipped_steps}
        if self._optimizer is not None:
            state |= {"step_count": self._optimizer.step_count, "schedule": self.schedule.state_dict()}
            state |= {"recent_norms": self._gate.state_dict()}
        checkpoint.save(Path(directory), self.spec, self._store, self._optimizer, state, self._companions)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Restore the complete state, also after a failed update; pending gradients are dropped, the reference is not touched."""
        self._require_open()
        if self._optimizer is not None:
            self._drop_gradients()
            self._optimizer.settle()
        state = checkpoint.load(Path(directory), self.spec, self._store, self._optimizer)
        self._skipped_steps = state["skipped_steps"]
        if self._optimizer is not None:
            self._optimizer.step_count = state["step_count"]
            self.schedule.load_state_dict(state["schedule"])
            self._gate.load_state_dict(state["recent_norms"])

    def synchronize(self) -> None:
        """Until gradients have landed and the optimizer is done."""
        self._require_settled()
        self._executor.drain()
        self._wait_for_optimizer()

    def close(self) -> None:
        """Stop the threads and give the host memory back, also after an error. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as then:  # each, the last first, whatever comes of the others
            for part in (self._store, self._reference, self._gradients, self._optimizer, self._executor):
                if part is not None:
                    then.callback(part.close)

    # ---- inside ----

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the error on its way up is the one to tell
                self.close()
            raise

    def _set(self, block: Block, name: str, tensor: Tensor) -> None:
        """Store one parameter and, for bf16 weights, the part of it that bf16 cannot hold."""
        check_shape(block, name, tuple(tensor.shape))
        place = self._store.view(block, name)
        if self._optimizer is None or self._store.dtype != torch.bfloat16:
            copy_rounded(place, tensor)
        else:
            residual = block.layout.view(self._optimizer.state[block.name].residual, name)
            if tensor.dtype == torch.bfloat16:
                place.copy_(tensor)
                residual.zero_()
            else:
                split_master(tensor.float(), place, residual)

    def _frozen_store(self, reader: CheckpointReader) -> WeightStore:
        pin = self._device.type == "cuda"
        if self.config.reference == "mmap":
            return MappedStore(self.spec, reader, self.config.param_torch_dtype, pin=pin)
        store = HostStore(self.spec, self.config.param_torch_dtype, pin=pin)
        for block in self.spec.blocks:
            fill_from_checkpoint(block, store.begin_write(block), reader)
            store.end_write(block)
        return store

    def _drop_gradients(self) -> None:
        """After a failure: nothing that was summed so far may reach an update."""
        with contextlib.suppress(RuntimeError):  # the error that is on its way up is the one to tell
            self._executor.drain()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self._optimizer.revoke()
        self._gradients.clear()
        self._nonfinite_loss = False
        self._step_promised = False

    def _may_speculate(self) -> bool:
        # a weight that decays to nothing does not come back
        reversible = self._optimizer.can_guess and self.schedule.lr * self.adamw.weight_decay < 1
        return self.config.overlap_optimizer and reversible and self._gate.open

    def _open_update(self) -> None:
        self._optimizer.guess(lr=self.schedule.lr, limit=self._gate.limit)

    def _sweeps(self, packs: Sequence[PackedBatch], *, train: bool) -> list[list[PackedBatch]]:
        if not packs:
            raise ValueError("no packs: the mini-batch is empty")
        check_packs(self.plan, self.config, packs)
        schedule = LayerSchedule(self.spec.num_layers, self.config.checkpoint_interval, train=train)
        hidden_bytes = self.spec.hidden_size * self.config.param_torch_dtype.itemsize
        tokens = [self._executor.padded_tokens(pack) for pack in packs]
        return cut_sweeps(self.plan, packs, tokens, bytes_per_token=schedule.num_slots * hidden_bytes)

    def _require_training(self) -> None:
        self._require_open()
        if self._optimizer is None:
            raise ValueError("this trainer is forward only (adamw=None)")

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the trainer is closed")

    def _require_settled(self) -> None:
        if self._step_promised:
            raise ValueError(
                "forward_backward(final=True) promised an update: call optim_step, or zero_grad to drop it"
            )

    def _wait_for_optimizer(self) -> None:
        self._require_open()
        if self._optimizer is not None:
            self._optimizer.wait()


def optimizer_threads() -> int:
    """Seven of every eight cores: one thread gives the GPU its work meanwhile, and one waits for what lands."""
    cores = usable_cores()
    return max(1, cores - cores // 8)


def _nothing() -> None:
    pass
