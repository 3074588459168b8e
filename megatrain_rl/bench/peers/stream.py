"""This package as one of the engines, with its own schedule or with the reference's."""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from megatrain_rl.batch import PackedBatch
from megatrain_rl.bench.data import PolicyGradientSurrogate
from megatrain_rl.bench.peers.engine import ADAMW
from megatrain_rl.bench.step import StepMode, one_step
from megatrain_rl.config import StreamConfig
from megatrain_rl.trainer import StreamTrainer


class StreamEngine:
    def __init__(
        self,
        hf_config: PretrainedConfig,
        config: StreamConfig,
        mode: StepMode,
        device: torch.device,
        *,
        micro_batch_tokens: int,
        seed: int,
    ):
        self._mode = mode
        self._trainer = StreamTrainer.from_config(
            hf_config, config=mode.configure(config, micro_batch_tokens), adamw=ADAMW, device=device, seed=seed
        )
        self.settings = f"{mode}, {self._trainer.config}, packs of {self._trainer.pack_tokens}"

    @property
    def pack_tokens(self) -> int:
        return self._trainer.pack_tokens

    def step(self, packs: Sequence[PackedBatch], objective: PolicyGradientSurrogate) -> str:
        return one_step(self._trainer, self._mode, list(packs), objective)

    def finish(self) -> None:
        self._trainer.synchronize()

    def close(self) -> None:
        self._trainer.close()
