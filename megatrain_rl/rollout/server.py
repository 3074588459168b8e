"""The Ray actor behind `rollout.name=embedded`: it fulfils the contract of VERL's own servers (see
`verl.workers.rollout.replica`).

Everything that touches the model runs on the server's one model thread, in the order it was asked for: a decoding
step, an abort and a weight update can therefore never overlap. Started and called by `embedded.py`; requests come
from VERL's `LLMServerClient`.
"""

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from megatrain_rl.host.machine import usable_cores
from megatrain_rl.rollout.generation import BatchGenerator, Request
from megatrain_rl.rollout.sampling import SamplingParams
from megatrain_rl.rollout.weights import WeightUpdate

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Requests of one training batch arrive one by one over some milliseconds; an idle server waits this long to prefill
# them together.
_GATHER_SECONDS = 0.01


class EmbeddedServer:
    """The Ray actor that generates. All methods run on its event loop, all model work on its model thread."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int):
        self._config: RolloutConfig = omega_conf_to_dataclass(config)
        model_config = omega_conf_to_dataclass(model_config)
        self._replica_rank = replica_rank
        self._num_threads = _num_threads(self._config)
        self._thread = ThreadPoolExecutor(
            max_workers=1, initializer=torch.set_num_threads, initargs=(self._num_threads,)
        )
        self._model = self._thread.submit(_build_model, self._config, model_config).result()
        self._has_weights = self._config.load_format != "dummy"
        self._generator = BatchGenerator(
            self._model,
            eos_token_ids=_eos_token_ids(model_config),
            max_batch=self._config.max_num_seqs,
            max_prefill_tokens=self._config.max_num_batched_tokens,
        )
        self._update: WeightUpdate | None = None
        self._global_steps = 0
        self._queue: list[Request] = []
        self._futures: dict[Request, asyncio.Future] = {}
        self._work = asyncio.Event()
        self._gate_open = asyncio.Event()
        self._gate_open.set()
        self._rejecting = False
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._loop_task: asyncio.Task | None = None

    async def launch_server(self) -> None:
        self._loop_task = asyncio.create_task(self._serve())

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list | None = None,
        video_data: list | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Token ids in, token ids out (EOS included). An error of this request or of its step reaches the caller."""
        if image_data or video_data or kwargs.get("audio_data"):
            raise ValueError(
                "rollout.name=embedded generates from text only; use rollout.name=vllm for images, video or audio"
            )
        prompt_ids = [int(token) for token in prompt_ids]
        self._check_vocabulary(prompt_ids)
        params = self._sampling_params(prompt_ids, sampling_params)
        while not self._gate_open.is_set():
            if self._rejecting:
                return TokenOutput(
                    token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self._global_steps}
                )
            await self._gate_open.wait()
        if not self._has_weights:
            raise RuntimeError(
                "the embedded rollout was asked to generate before the trainer sent weights (load_format=dummy)"
            )
        request = Request(prompt_ids=prompt_ids, params=params, random=self._random(prompt_ids, params))
        self._futures[request] = asyncio.get_running_loop().create_future()
        self._queue.append(request)
        self._work.set()
        try:
            return await self._futures[request]
        except asyncio.CancelledError:
            self._queue = [queued for queued in self._queue if queued is not request]
            await self._on_model_thread(self._generator.discard, request)
            raise
        finally:
            del self._futures[request]

    async def abort_all_requests(self, reject_request: bool = False, **kwargs: Any) -> dict[str, Any]:
        """End every unfinished request as it stands ("aborted") and hold later ones until `resume_generation`.

        reject_request: answer later ones "aborted" at once instead of holding them.
        """
        self._gate_open.clear()
        self._rejecting = reject_request
        queued, self._queue = self._queue, []
        aborted = queued + await self._on_model_thread(self._generator.abort_all)
        for request in aborted:
            self._resolve(request, "aborted")
        return {"aborted_count": len(aborted)}

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._gate_open.set()

    async def begin_weight_update(self) -> None:
        """Start an update; what an unfinished earlier one had collected is dropped."""
        self._update = WeightUpdate(self._model)

    async def add_weights(self, bucket: list[tuple[str, Tensor]]) -> None:
        self._open_update().add(bucket)

    async def commit_weight_update(self, global_steps: int | None) -> None:
        """Put the whole update into the model between two decoding steps; answers under way go on with it."""
        update, self._update = self._open_update(), None
        await self._on_model_thread(self._apply, update)
        self._has_weights = True
        self._seen.clear()
        if global_steps is not None:
            self._global_steps = int(global_steps)

    async def set_global_steps(self, global_steps: int) -> None:
        self._global_steps = int(global_steps)

    async def clear_kv_cache(self) -> None:
        await self._on_model_thread(self._generator.drop_cache)

    async def wake_up(self, tags: list[str] | None = None, **kwargs: Any) -> None:
        """Nothing sleeps: the model stays in host RAM. The same holds for the other memory calls below."""

    async def sleep(self, **kwargs: Any) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **kwargs: Any) -> None: ...

    async def stop_profile(self, **kwargs: Any) -> None: ...

    def _apply(self, update: WeightUpdate) -> None:
        """Commit and drop the cache in one job of the model thread.

        A step between the two would decode with new weights over old keys and values.
        """
        update.commit()
        self._generator.drop_cache()

    def _open_update(self) -> WeightUpdate:
        if self._update is None:
            raise RuntimeError("weights arrived without begin_weight_update")
        return self._update

    def _check_vocabulary(self, prompt_ids: list[int]) -> None:
        embeddings = self._model.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        size = embeddings.num_embeddings
        for token in prompt_ids:
            if not 0 <= token < size:
                raise ValueError(f"prompt token {token} is outside the model's vocabulary of {size}")

    def _sampling_params(self, prompt_ids: list[int], given: dict[str, Any]) -> SamplingParams:
        config = self._config
        context = config.max_model_len or config.prompt_length + config.response_length
        room = context - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room in rollout.max_model_len={context}")
        settings = {"repetition_penalty": config.repetition_penalty, "ignore_eos": config.ignore_eos, **given}
        return SamplingParams.from_request(settings, default_max_tokens=config.response_length, room=room)

    def _random(self, prompt_ids: list[int], params: SamplingParams) -> random.Random:
        """The request's random numbers.

        Without a seed of its own they follow from rollout.seed, the weights' version, the prompt and how often this
        prompt came since the weights changed: a run repeats whatever the order in which its requests arrive, and
        siblings differ.
        """
        if params.seed is not None:
            return random.Random(params.seed)
        key = tuple(prompt_ids)
        self._seen[key] += 1
        return random.Random(f"{self._config.seed} {self._replica_rank} {self._global_steps} {self._seen[key]} {key}")

    async def _on_model_thread(self, function: Callable, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _serve(self) -> None:
        """Step while anybody waits for an answer. An error of a step goes to every request that was in it."""
        while True:
            await self._work.wait()
            self._work.clear()
            await asyncio.sleep(_GATHER_SECONDS)
            while self._futures:
                joining, self._queue = self._queue, []
                try:
                    finished = await self._on_model_thread(self._step, joining)
                except Exception as error:
                    await self._on_model_thread(self._generator.abort_all)
                    for request in set(self._futures) - set(self._queue):
                        self._resolve(request, error)
                    await asyncio.sleep(0)
                    continue
                for request in finished:
                    self._resolve(request, "completed")
                # Let answered callers leave `_futures` before the loop condition looks at it.
                await asyncio.sleep(0)

    def _step(self, joining: list[Request]) -> list[Request]:
        for request in joining:
            self._generator.add(request)
        return self._generator.step()

    def _resolve(self, request: Request, outcome: str | Exception) -> None:
        future = self._futures.get(request)
        if future is None or future.done():  # its caller has gone
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
            return
        output = TokenOutput(
            token_ids=request.token_ids,
            log_probs=request.log_probs if request.params.logprobs else None,
            stop_reason=outcome,
            num_preempted=0,
            extra_fields={"global_steps": self._global_steps},
        )
        future.set_result(output)


def _num_threads(config: RolloutConfig) -> int:
    """Threads of the model. Ray sets OMP_NUM_THREADS=1 in its actors, so torch's own default would be one thread."""
    knobs = dict(config.engine_kwargs.get("embedded") or {})
    threads = knobs.pop("num_threads", None)
    if knobs:
        raise ValueError(f"unknown setting rollout.engine_kwargs.embedded.{sorted(knobs)[0]}; known: num_threads")
    if threads is None:
        return usable_cores()
    if not isinstance(threads, int) or threads < 1:
        raise ValueError(f"rollout.engine_kwargs.embedded.num_threads={threads!r}: must be at least 1, or null")
    return threads


def _build_model(config: RolloutConfig, model_config: HFModelConfig) -> PreTrainedModel:
    """Build the model. With load_format=dummy its values are random: the trainer sends all of them before a request."""
    if config.dtype not in _DTYPES:
        raise ValueError(f"rollout.dtype={config.dtype!r}: rollout.name=embedded knows {', '.join(_DTYPES)}")
    hf_config = copy.deepcopy(model_config.hf_config)
    # VERL's default attn_implementation is flash_attention_2, which needs a GPU.
    options = dict(
        dtype=_DTYPES[config.dtype], attn_implementation="sdpa", trust_remote_code=model_config.trust_remote_code
    )
    if config.load_format == "dummy":
        return AutoModelForCausalLM.from_config(hf_config, **options).eval()
    assert model_config.local_path is not None  # HFModelConfig sets it
    return AutoModelForCausalLM.from_pretrained(model_config.local_path, config=hf_config, **options).eval()


def _eos_token_ids(model_config: HFModelConfig) -> set[int]:
    """The tokenizer's EOS and those of the generation config, as vLLM takes them."""
    found: set[int] = set()
    sources = [model_config.tokenizer.eos_token_id]
    if model_config.generation_config is not None:
        sources.append(model_config.generation_config.eos_token_id)
    for ids in sources:
        found.update([ids] if isinstance(ids, int) else ids or [])
    if not found:
        raise ValueError(
            "neither the tokenizer nor generation_config.json has an EOS token; set eos_token_id in one of them"
        )
    return found
