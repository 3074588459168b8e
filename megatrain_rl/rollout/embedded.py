"""VERL's handles on the embedded rollout: the adapter in the trainer's worker and the replica that starts the server.

`rollout.name=embedded`; registered by `verl_plugin/register.py`.

Settings: VERL's rollout.* (temperature, top_p, top_k, dtype, seed, max_num_seqs, max_num_batched_tokens,
max_model_len, ...) and `rollout.engine_kwargs.embedded.num_threads`, the threads of the model (null: every core this
process may use).
"""

import os
from typing import Any, cast

import ray
import torch
from ray.actor import ActorHandle
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from megatrain_rl.rollout.server import EmbeddedServer


def _server_name(replica_rank: int, suffix: str = "") -> str:
    return f"embedded_server_{replica_rank}{suffix}"


class EmbeddedServerAdapter(BaseRollout):
    """Lives in the trainer's worker and pushes its weights to the server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **kwargs: Any):
        super().__init__(config, model_config, device_mesh)
        # One worker a replica: `EmbeddedReplica` refuses model parallelism.
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self.sleep_level = 2  # VERL's worker assigns and reads it
        self._server: ActorHandle | None = None

    @property
    def _handle(self) -> ActorHandle:
        # The replica starts the server after this object is built.
        if self._server is None:
            self._server = ray.get_actor(_server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """The server never gives its memory back, so there is nothing to bring back."""

    async def release(self) -> None:
        """See `resume`."""

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Send (HF name, tensor) pairs in buckets of `checkpoint_engine.update_weights_bucket_megabytes`."""
        if wire_format != "named_tensors":
            raise ValueError(
                f"rollout.name=embedded takes full weights only; checkpoint_engine.backend sends {wire_format}"
            )
        if peft_config is not None:
            raise ValueError("rollout.name=embedded takes full weights only; set model.lora_rank=0")
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        await self._handle.begin_weight_update.remote()
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        async for name, tensor in ensure_async_iterator(weights):
            if bucket and size + tensor.nbytes > limit:
                await self._handle.add_weights.remote(bucket)
                bucket, size = [], 0
            # A clone, since pickling a view of the trainer's flat buffer would send the whole buffer.
            bucket.append((name, tensor.detach().clone().cpu()))
            size += tensor.nbytes
        await self._handle.add_weights.remote(bucket)
        await self._handle.commit_weight_update.remote(global_steps)


class EmbeddedReplica(RolloutReplica):
    """One server actor; it needs no accelerator and no cores set aside."""

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ValueError(
                "rollout.name=embedded runs one process per replica: set rollout.tensor_model_parallel_size=1, "
                "data_parallel_size=1 and pipeline_model_parallel_size=1"
            )
        name = _server_name(self.replica_rank, self.name_suffix)
        actor = ray.remote(EmbeddedServer).options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
        handle = actor.remote(config=self.config, model_config=self.model_config, replica_rank=self.replica_rank)
        server = cast(ActorHandle, handle)  # Ray's types take the class for a method that may be called directly too
        await server.launch_server.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = name
