"""BatchGenerator: continuous batching on a transformers model with a KV cache.

Rows are left-padded to a common length, with explicit positions, so joining and leaving is a pad or a select: waiting
prompts are prefilled together and join the running batch, a finished row leaves it at once. Every call must come from
one thread, which also owns the model; `server.py` sees to that.

Shapes: B running rows, N rows being prefilled, L columns of the cache.
"""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from megatrain_rl.rollout.sampling import SamplingParams, choose_tokens

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}


@dataclass(eq=False, kw_only=True)
class Request:
    """One answer in the making. `random` gives one uniform a token, whatever the neighbours draw."""

    prompt_ids: list[int]
    params: SamplingParams
    random: random.Random
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def all_ids(self) -> list[int]:
        return self.prompt_ids + self.token_ids


class BatchGenerator:
    """Add requests, call `step` until they come back.

    eos_token_ids: any of them ends an answer and is its last token. max_batch: most rows at a time.
    max_prefill_tokens: most padded tokens of one prefill (a single longer prompt goes alone).
    """

    def __init__(
        self, model: PreTrainedModel, *, eos_token_ids: Iterable[int], max_batch: int, max_prefill_tokens: int
    ):
        kinds = set(model.config.get_text_config().to_dict().get("layer_types") or ()) - _ATTENTION_KINDS
        if kinds:
            raise ValueError(
                f"rollout.name=embedded caches keys and values of attention layers only; {model.config.model_type} has "
                f"{', '.join(sorted(kinds))} layers: use rollout.name=vllm"
            )
        self._model = model
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_batch = max_batch
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: deque[Request] = deque()
        self._clear_batch()

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One token for every running row and for as many waiting prompts as fit. Returns what finished."""
        finished = self._decode() if self._running else []
        joining = self._take_waiting()
        return finished + (self._prefill(joining) if joining else [])

    def abort_all(self) -> list[Request]:
        """Forget every request; returns them with what they have so far."""
        aborted = [*self._running, *self._waiting]
        self._waiting.clear()
        self._clear_batch()
        return aborted

    def discard(self, request: Request) -> None:
        """Forget one request, if it is still here."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._running:
            self._keep([i for i, other in enumerate(self._running) if other is not request])

    def drop_cache(self) -> None:
        """Recompute keys and values before the next token: those in the cache are of weights that are gone."""
        self._waiting.extendleft(reversed(self._running))
        self._clear_batch()

    def _clear_batch(self) -> None:
        self._running: list[Request] = []
        self._cache = DynamicCache()
        self._mask_BL = torch.zeros(0, 0, dtype=torch.long)

    def _take_waiting(self) -> list[Request]:
        """Waiting requests in order of arrival, as many as the batch and one prefill hold."""
        taken: list[Request] = []
        longest = 0
        while self._waiting and len(self._running) + len(taken) < self._max_batch:
            longest = max(longest, len(self._waiting[0].all_ids))
            if taken and longest * (len(taken) + 1) > self._max_prefill_tokens:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _prefill(self, joining: list[Request]) -> list[Request]:
        longest = max(len(request.all_ids) for request in joining)
        ids_NL = torch.zeros(len(joining), longest, dtype=torch.long)
        mask_NL = torch.zeros(len(joining), longest, dtype=torch.long)
        for i, request in enumerate(joining):
            ids_NL[i, longest - len(request.all_ids) :] = torch.tensor(request.all_ids)
            mask_NL[i, longest - len(request.all_ids) :] = 1
        # Without the model's config, so that sliding-window layers keep all columns too and stay aligned with the mask.
        cache = DynamicCache()
        positions_NL = (mask_NL.cumsum(-1) - 1).clamp(min=0)
        logits_NV = self._forward(ids_NL, mask_NL, positions_NL, cache)
        self._join(joining, cache, mask_NL)
        return self._append_tokens(logits_NV, first_row=len(self._running) - len(joining))

    def _decode(self) -> list[Request]:
        self._mask_BL = pad(self._mask_BL, (0, 1), value=1)
        ids_B1 = torch.tensor([[request.token_ids[-1]] for request in self._running])
        positions_B1 = self._mask_BL.sum(-1, keepdim=True) - 1
        return self._append_tokens(self._forward(ids_B1, self._mask_BL, positions_B1, self._cache), first_row=0)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _append_tokens(self, logits_BV: Tensor, first_row: int) -> list[Request]:
        """Choose a token for the rows from `first_row` on; rows that end with it leave the batch and are returned."""
        rows = self._running[first_row:]
        tokens_B, log_probs_B = choose_tokens(
            logits_BV,
            [request.params for request in rows],
            [request.random.random() for request in rows],
            [request.all_ids for request in rows],
        )
        for request, token, log_prob in zip(rows, tokens_B.tolist(), log_probs_B.tolist(), strict=True):
            request.token_ids.append(token)
            request.log_probs.append(log_prob)
        finished = [request for request in rows if self._is_finished(request)]
        if finished:
            done = set(map(id, finished))
            self._keep([i for i, request in enumerate(self._running) if id(request) not in done])
        return finished

    def _is_finished(self, request: Request) -> bool:
        token, params = request.token_ids[-1], request.params
        stopped = token in params.stop_token_ids or (token in self._eos_token_ids and not params.ignore_eos)
        return stopped or len(request.token_ids) >= params.max_tokens

    def _join(self, joining: list[Request], cache: DynamicCache, mask_NL: Tensor) -> None:
        """Put prefilled rows under the running ones; the shorter of the two caches is padded on the left."""
        if self._running:
            width = max(mask_NL.shape[1], self._mask_BL.shape[1])
            for mine, other in zip(_layers(self._cache), _layers(cache), strict=True):
                mine.keys = torch.cat([_widen(mine.keys, width), _widen(other.keys, width)])
                mine.values = torch.cat([_widen(mine.values, width), _widen(other.values, width)])
            mask_NL = torch.cat([pad(m, (width - m.shape[1], 0)) for m in (self._mask_BL, mask_NL)])
        else:
            self._cache = cache
        self._mask_BL = mask_NL
        self._running = self._running + joining

    def _keep(self, rows: list[int]) -> None:
        """Leave only these rows, and cut the columns that are padding in all of them."""
        if not rows:
            self._clear_batch()
            return
        index = torch.tensor(rows)
        mask_BL = self._mask_BL[index]
        first = int(mask_BL.argmax(-1).min())
        for layer in _layers(self._cache):
            layer.keys = layer.keys[index, :, first:]
            layer.values = layer.values[index, :, first:]
        self._mask_BL = mask_BL[:, first:]
        self._running = [self._running[i] for i in rows]


class _KeysValues(Protocol):
    """Layer of a cache: keys and values (B, heads, L, head size)."""

    keys: Tensor
    values: Tensor


def _layers(cache: DynamicCache) -> list[_KeysValues]:
    # transformers' type allows layers that are empty or of linear attention: a forward has filled these, and
    # BatchGenerator refuses the others
    return cast(list[_KeysValues], cache.layers)


def _widen(states_BHLD: Tensor, width: int) -> Tensor:
    """Zero columns on the left, masked for ever; zeros and not garbage, since 0 * NaN is NaN."""
    return pad(states_BHLD, (0, 0, width - states_BHLD.shape[-2], 0))
