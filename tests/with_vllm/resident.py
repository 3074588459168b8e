"""A resident vLLM engine as VERL's server starts it, with VERL's own ServerAdapter to push weights into it.

Runs where vLLM is. Only Ray is missing: `_Handle` plays the actor that holds the engine, so the adapter, the bucketed
transfer and the worker extension are VERL's, in the order of a training step. The engine lives on the caller's event
loop, the adapter on a thread of its own: VERL's sender blocks its loop, as it does in the trainer's process.
"""

import asyncio
import itertools
import os
import types
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import ray
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from verl_patches import ours, weight_transfer_socket

_EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Greedy continuation of a prompt.

    log_probs: one for each of its tokens. prompt_log_probs: one for each of the prompt's from the second on, if asked
    for. cached_tokens: how many of the prompt's tokens the prefix cache had.
    """

    tokens: list[int]
    log_probs: list[float]
    prompt_log_probs: list[float]
    cached_tokens: int


class ResidentEngine:
    """Built by `start`."""

    def __init__(self, engine: AsyncLLM):
        self._engine = engine
        self._request_ids = (f"request-{i}" for i in itertools.count())

    @classmethod
    async def start(cls, model: str, *, dtype: str, vocab_size: int, **settings) -> "ResidentEngine":
        """Start on the model's files. `settings` are AsyncEngineArgs."""
        # as in every local cluster of Ray; what VERL's server does then
        node = uuid.uuid4().hex
        context = types.SimpleNamespace(get_job_id=lambda: "01000000", get_node_id=lambda: node)
        ray.get_runtime_context = lambda: context
        os.environ[weight_transfer_socket.VARIABLE] = weight_transfer_socket.ids()[1]
        arguments = AsyncEngineArgs(
            model=model, dtype=dtype, max_model_len=256, max_num_seqs=8, enforce_eager=True, load_format="auto",
            skip_tokenizer_init=True, distributed_executor_backend="uni", enable_prefix_caching=True, block_size=32,
            logprobs_mode="processed_logprobs", worker_extension_cls=_EXTENSION, **settings,
        )  # fmt: skip
        engine = AsyncLLM.from_engine_args(arguments)
        await engine.collective_rpc("monkey_patch_model", kwargs={"vocab_size": vocab_size})
        return cls(engine)

    async def answer(self, prompt: list[int], *, tokens: int, prompt_log_probs: bool = False) -> Answer:
        """vLLM does not read the prefix cache for a request that wants the prompt's log-probs."""
        wanted = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0,
            prompt_logprobs=0 if prompt_log_probs else None, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        async for output in self._engine.generate({"prompt_token_ids": prompt}, wanted, next(self._request_ids)):
            final = output
        made = final.outputs[0]
        return Answer(
            tokens=list(made.token_ids),
            log_probs=[entry[t].logprob for entry, t in zip(made.logprobs, made.token_ids, strict=True)],
            prompt_log_probs=[
                entry[t].logprob for entry, t in zip((final.prompt_logprobs or [None])[1:], prompt[1:], strict=False)
            ],
            cached_tokens=final.num_cached_tokens or 0,
        )

    async def answer_of_server(self, prompt: list[int], *, tokens: int) -> tuple[list[int], SamplingParams]:
        """Ask VERL's server for this engine's greedy answer; returns it and the parameters that vLLM was given.

        Only Ray and HTTP are missing.
        """
        from verl.workers.config import RolloutConfig
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

        given = []

        def generate(*, sampling_params, **kwargs):
            given.append(sampling_params)
            return self._engine.generate(sampling_params=sampling_params, **kwargs)

        async def admit(request_id):
            server._admitting += 1

        server = types.SimpleNamespace(
            _disaggregation_role="null", _admitting=0, _park_until_admitted=admit, lora_as_adapter=False, replica_rank=0,
            global_steps=0, engine=types.SimpleNamespace(generate=generate), model_config=types.SimpleNamespace(processor=None),
            config=RolloutConfig(name="vllm", max_model_len=256, prompt_length=len(prompt), response_length=tokens, custom=ours.marked(None)),
        )  # fmt: skip
        output = await vLLMHttpServer.generate(
            server, prompt, {"temperature": 0.0, "logprobs": True, "ignore_eos": True}, next(self._request_ids)
        )
        return list(output.token_ids), given[0]

    async def sync(self, weights: Iterable[tuple[str, Tensor]], *, bucket_megabytes: int) -> None:
        """Do what the trainer's worker does after a step."""
        adapter = _adapter(self._engine, bucket_megabytes)
        await asyncio.to_thread(lambda: asyncio.run(adapter.update_weights(iter(weights), base_sync_done=True)))

    def close(self) -> None:
        """End vLLM's processes, also those that hang."""
        self._engine.shutdown(timeout=5)


def _adapter(engine: AsyncLLM, bucket_megabytes: int):
    """VERL's adapter of the trainer's worker, connected to `engine`, in a run of ours."""
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    ours.note_engine()
    os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
    bucket = CheckpointEngineConfig(update_weights_bucket_megabytes=bucket_megabytes)
    config = RolloutConfig(
        name="vllm", checkpoint_engine=bucket, tensor_model_parallel_size=1, custom=ours.marked(None)
    )
    adapter = ServerAdapter(config=config, model_config=None, device_mesh=None)
    adapter.server_handle = _Handle(engine, asyncio.get_running_loop())
    return adapter


class _Handle:
    """The Ray actor of VERL's vLLM server, as far as a weight sync calls it.

    `handle.method.remote(...)` gives an awaitable.
    """

    def __init__(self, engine: AsyncLLM, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self.collective_rpc = self._remote(engine.collective_rpc)
        # vLLMHttpServer.clear_kv_cache
        self.clear_kv_cache = self._remote(lambda: engine.reset_prefix_cache(reset_connector=True))

    def _remote(self, method):
        def remote(*args, **kwargs):
            running = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._loop)
            return asyncio.wrap_future(running)

        return types.SimpleNamespace(remote=remote)


def plain_log_probs(model: torch.nn.Module, ids: list[int]) -> Tensor:
    """(len(ids) - 1,) fp32 log-probs of every token but the first under a plain Hugging Face model."""
    with torch.no_grad():
        logits = model(torch.tensor([ids], device=model.device)).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:], device=model.device)[:, None])[:, 0].cpu()
