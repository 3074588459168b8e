"""PyTorch FSDP2 with CPU offload.

Parameters, gradients and fused AdamW are fp32 and on the host, compute is bf16; each layer is one unit.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from megatrain_rl.batch import PackedBatch
from megatrain_rl.bench.data import PolicyGradientSurrogate
from megatrain_rl.bench.peers.engine import ADAMW
from megatrain_rl.bench.peers.model import MicroBatch, PeerModel
from megatrain_rl.optim.library import fused_adamw


class Fsdp2Engine:
    def __init__(self, config: PretrainedConfig, device: torch.device, *, micro_batch_tokens: int, seed: int):
        cuda = device.type == "cuda"
        # gloo beside nccl: the gradient norm is reduced where the gradients are, on the host
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        # a store in this process: the default one listens on all network interfaces
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self._device = device
        self.pack_tokens = micro_batch_tokens
        self._model = PeerModel(config, dtype=torch.float32, device=device, seed=seed).to("cpu")
        if cuda:
            torch.cuda.empty_cache()
        mesh = init_device_mesh(device.type, (1,))
        self._sharded = self._shard(mesh, CPUOffloadPolicy() if cuda else OffloadPolicy())
        self._optimizer = fused_adamw(self._model.parameters(), ADAMW)
        self.settings = (
            f"torch {torch.__version__}, fully_shard per layer, reshard_after_forward, CPUOffloadPolicy (pinned), param bf16, "
            f"reduce fp32, gradients of micro-batches summed on the GPU and moved once, AdamW(fused=True) on the host, "
            f"micro-batches of {micro_batch_tokens}"
        )

    def _shard(self, mesh: DeviceMesh, offload: OffloadPolicy) -> FSDPModule:
        """Shard the model where it is; returns it, with the methods that it has now."""
        settings: dict[str, Any] = dict(
            mesh=mesh,
            reshard_after_forward=True,
            # inputs are bf16 already where they should be; a cast would round the loss's coefficients too
            mp_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            offload_policy=offload,
        )
        decoder = self._model.decoder
        for i, layer in enumerate(decoder.layers):
            # the checkpoint inside the sharded unit, so that one gather serves recomputation and backward
            decoder.layers[i] = fully_shard(checkpoint_wrapper(layer), **settings)
        if not self._model.tied:
            fully_shard(decoder.embed_tokens, **settings)
            fully_shard(self._model.lm_head, **settings)
        return fully_shard(self._model, **settings)

    def step(self, packs: Sequence[PackedBatch], objective: PolicyGradientSurrogate) -> str:
        losses = []
        for i, pack in enumerate(packs):
            # Summed on the device, 4 bytes a parameter there, and moved with the last: a move after every micro-batch,
            # of what is then no longer the first gradient, is a copy into fresh pageable memory. A step took five times
            # as long that way (recipes/records/peers_unfinished_h200.json).
            self._sharded.set_requires_gradient_sync(i == len(packs) - 1)
            batch = MicroBatch.of(pack, objective.coefficients(pack), self._device, torch.bfloat16)
            loss = self._model(batch)
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), ADAMW.clip_grad or math.inf)
        assert isinstance(norm, DTensor)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return f"{len(packs)} packs, loss {float(torch.stack(losses).sum()):.5f}, grad norm {float(norm.full_tensor()):.4f}"

    def finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        dist.destroy_process_group()
