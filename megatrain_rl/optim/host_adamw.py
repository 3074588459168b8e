"""HostAdamW: optimizer state in host RAM, and the thread that steps it while the caller goes on.

State per parameter: int16 residual (bf16 weights only), fp32 exp_avg and exp_avg_sq; flat per block, laid out like the weights.
`start_step` returns at once; blocks are stepped in the order the next forward needs them, and whoever reads a block's weights
waits for that block in `HostStore.read`.
"""

import queue
import threading

import torch
from torch import Tensor

from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.host.gradients import HostGradients
from megatrain_rl.host.store import HostStore
from megatrain_rl.model.decoder import Block, DecoderSpec
from megatrain_rl.ops.adamw import AdamWScalars, adamw_native
from megatrain_rl.ops.build import load_library
from megatrain_rl.optim.library import LibraryAdamW, deepspeed_adamw, torch_adamw


class BlockState:
    """Optimizer state of one block; zero at the start."""

    def __init__(self, block: Block, *, split: bool):
        numel = block.layout.numel
        self.residual: Tensor | None = torch.zeros(numel, dtype=torch.int16) if split else None
        self.exp_avg = torch.zeros(numel, dtype=torch.float32)
        self.exp_avg_sq = torch.zeros(numel, dtype=torch.float32)

    def tensors(self) -> dict[str, Tensor]:
        named = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return named if self.residual is None else {**named, "residual": self.residual}


def make_library(config: StreamConfig, adamw: AdamWConfig) -> LibraryAdamW | None:
    """The library `config.optimizer` names, or None for the native op. What is missing on this machine is an error here, so
    call it before allocating anything."""
    if config.optimizer == "native":
        load_library("adamw")
        return None
    return {"torch": torch_adamw, "deepspeed": deepspeed_adamw}[config.optimizer](adamw)


class HostAdamW:
    """Steps `store` with `gradients`. `step_count` is the number of updates applied or started."""

    def __init__(
        self,
        spec: DecoderSpec,
        store: HostStore,
        gradients: HostGradients,
        adamw: AdamWConfig,
        library: LibraryAdamW | None,
        threads: int,
    ):
        self._spec = spec
        self._store = store
        self._gradients = gradients
        self._adamw = adamw
        self._threads = threads
        self._library = library
        self.state = {b.name: BlockState(b, split=store.dtype == torch.bfloat16) for b in spec.blocks}
        self.step_count = 0
        self._jobs: queue.Queue[tuple[Block, AdamWScalars, float] | None] = queue.Queue()
        self._worker = threading.Thread(target=self._run, name="host-adamw", daemon=True)
        self._worker.start()

    def start_step(self, *, lr: float, grad_scale: float) -> None:
        """Begin one update of every block. Gradients must have landed; they count as used once their block is stepped."""
        self.wait()
        self.step_count += 1
        a = self._adamw
        scalars = AdamWScalars.of(
            lr=lr, betas=a.betas, eps=a.eps, weight_decay=a.weight_decay, step=self.step_count, grad_scale=grad_scale
        )
        for block in self._spec.blocks:
            self._store.begin_write(block)
        for block in self._spec.blocks:
            self._jobs.put((block, scalars, lr))

    def wait(self) -> None:
        """Until the update is complete; raises what went wrong in it."""
        self.settle()
        self._store.read(self._spec.embed)

    def settle(self) -> None:
        """Until the worker is idle, whatever came of its work."""
        self._jobs.join()

    def close(self) -> None:
        self._jobs.put(None)
        self._worker.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                self._step_block(*job)
            except BaseException as error:  # raised where the weights are read
                self._store.fail(error)
            finally:
                self._jobs.task_done()

    def _step_block(self, block: Block, scalars: AdamWScalars, lr: float) -> None:
        state = self.state[block.name]
        weight = self._store.begin_write(block)
        grad = self._gradients.flat(block)
        if self._library is None:
            adamw_native(weight, state.residual, grad, state.exp_avg, state.exp_avg_sq, scalars, self._threads)
        else:
            self._library.step(
                weight, state.residual, grad, state.exp_avg, state.exp_avg_sq,
                lr=lr, step=self.step_count, scale=scalars.grad_scale,
            )  # fmt: skip
        self._store.end_write(block)
