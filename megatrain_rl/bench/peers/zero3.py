"""DeepSpeed ZeRO-3 with parameters and optimizer in pinned host memory.

It is set up as its documentation advises for one GPU.
"""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from megatrain_rl.batch import PackedBatch
from megatrain_rl.bench.data import PolicyGradientSurrogate
from megatrain_rl.bench.peers.engine import ADAMW
from megatrain_rl.bench.peers.model import MicroBatch, PeerModel
from megatrain_rl.ops.build_locks import wait_for_builds
from megatrain_rl.optim.library import deepspeed_cpu_adam

# What DeepSpeed builds on first use here; the process group's only on the CPU.
BUILT_OPS = ("deepspeed_shm_comm", "cpu_adam")


def zero3_config() -> dict:
    """DeepSpeed's settings. offload_param and offload_optimizer pin their memory unless told not to. The bucket sizes
    and limits are DeepSpeed's documented defaults, written out; the smaller ones that transformers fills in for "auto"
    fetch less far ahead."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        # set by hand around each backward: packs differ in number from step to step
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": ADAMW.clip_grad,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": int(5e8),
            "stage3_prefetch_bucket_size": int(5e7),
            "stage3_param_persistence_threshold": int(1e5),
            "stage3_max_live_parameters": int(1e9),
            "stage3_max_reuse_distance": int(1e9),
            "sub_group_size": int(1e9),
        },
    }


class Zero3Engine:
    def __init__(self, config: PretrainedConfig, device: torch.device, *, micro_batch_tokens: int, seed: int):
        import deepspeed
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        wait_for_builds(*BUILT_OPS, wanted_by="the engine zero3")
        backend = "nccl" if device.type == "cuda" else "gloo"
        # DeepSpeed takes a group that is there; its own has a store that listens on all network interfaces
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
        self._device = device
        self.pack_tokens = micro_batch_tokens
        # drawn on the device, where that takes a second; the engine wants it on the host
        model = PeerModel(config, dtype=torch.bfloat16, device=device, seed=seed).to("cpu")
        # reentrant: the other kind compares shapes of what it recomputes, and a partitioned weight has none
        model.decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        if device.type == "cuda":
            torch.cuda.empty_cache()
        optimizer = deepspeed_cpu_adam(model.parameters(), ADAMW)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero3_config())
        zero = DeepSpeedZeroConfig(**zero3_config()["zero_optimization"]).model_dump_json()
        self.settings = f"deepspeed {deepspeed.__version__}, ZeRO config {zero}, micro-batches of {micro_batch_tokens}"

    def step(self, packs: Sequence[PackedBatch], objective: PolicyGradientSurrogate) -> str:
        losses = []
        for i, pack in enumerate(packs):
            self._engine.set_gradient_accumulation_boundary(i + 1 == len(packs))
            batch = MicroBatch.of(pack, objective.coefficients(pack), self._device, torch.bfloat16)
            loss = self._engine(batch)
            self._engine.backward(loss)
            losses.append(loss.detach())
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return f"{len(packs)} packs, loss {float(torch.stack(losses).sum()):.5f}, grad norm {float(norm):.4f}"

    def finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        self._engine.destroy()
        torch.distributed.destroy_process_group()
