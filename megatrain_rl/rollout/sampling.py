"""The settings of one request, and the choice of the next token of every row of a batch.

Two distributions are kept apart. A token is DRAWN from the one the request describes: repetition penalty, then
temperature, then top-k, then top-p of what top-k left (vLLM's order). The log-prob REPORTED with it is of the
distribution the trainer differentiates: log_softmax(logits / temperature) over the whole vocabulary. With top_p=1,
top_k=-1 and no penalty, which is what VERL trains with by default, the two are the same; with truncation vLLM's
`processed_logprobs` would report the renormalised value instead, and the trainer's ratio would not be 1 on-policy. A
greedy request (temperature 0) reports at temperature 1.

Called by `generation.py`. Shapes: B rows, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# vLLM's limit: below it a request is greedy.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's settings.

    max_tokens: most tokens to generate. temperature: 0 is greedy. top_k: -1 or 0 keeps the whole vocabulary.
    seed: the request's own random numbers, whatever it is batched with; None takes them from the server's seed.
    stop_token_ids: end the answer besides the model's EOS ids; ignore_eos: only they do.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: bool = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name, holds, expected in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "not negative"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= -1, "-1 or 0 (off), or a number of tokens"),
            ("repetition_penalty", self.repetition_penalty > 0, "positive"),
        ):
            if not holds:
                raise ValueError(f"sampling parameter {name}={getattr(self, name)!r}: must be {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @classmethod
    def from_request(cls, given: Mapping[str, Any], *, default_max_tokens: int, room: int) -> "SamplingParams":
        """Build from VERL's `sampling_params`. A setting this rollout does not have is an error, not ignored.

        default_max_tokens: where the request sets neither max_tokens nor max_new_tokens.
        room: tokens the context has left; the limit is cut to it.
        """
        settings = dict(given)
        limit = settings.pop("max_new_tokens", None)
        limit = settings.pop("max_tokens", limit)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ValueError(
                f"rollout.name=embedded has no sampling parameter {unknown[0]}; known: {', '.join(sorted(known))}"
            )
        settings["stop_token_ids"] = tuple(settings.get("stop_token_ids") or ())
        return cls(max_tokens=min(default_max_tokens if limit is None else limit, room), **settings)


def choose_tokens(
    logits_BV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], histories: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """The next token of each row and its log-prob under the trainer's distribution, both (B,).

    uniforms: one number in [0, 1) a row, the only randomness. histories: prompt and answer so far, for the penalty.
    """
    logits_BV = logits_BV.float()
    if not torch.isfinite(logits_BV).all():
        raise FloatingPointError("the rollout's logits are not finite: the weights it received have diverged")
    temperature_B1 = torch.tensor([[1.0 if p.greedy else p.temperature] for p in params])
    scores_BV = _penalize(logits_BV, params, histories)
    drawn_B = _draw(scores_BV / temperature_B1, params, torch.tensor(uniforms, dtype=torch.float64))
    greedy_B = torch.tensor([p.greedy for p in params])
    tokens_B = torch.where(greedy_B, scores_BV.argmax(-1), drawn_B)
    log_probs_BV = torch.log_softmax(logits_BV / temperature_B1, dim=-1)
    return tokens_B, log_probs_BV.gather(-1, tokens_B[:, None]).squeeze(-1)


def _penalize(logits_BV: Tensor, params: Sequence[SamplingParams], histories: Sequence[Sequence[int]]) -> Tensor:
    """Repetition penalty (Keskar et al. 2019): seen tokens' logits are divided by it if positive, else multiplied."""
    rows = [i for i, p in enumerate(params) if p.repetition_penalty != 1.0]
    if not rows:
        return logits_BV
    scores_BV = logits_BV.clone()
    for i in rows:
        seen = torch.tensor(sorted(set(histories[i])))
        values = scores_BV[i, seen]
        penalty = params[i].repetition_penalty
        scores_BV[i, seen] = torch.where(values > 0, values / penalty, values * penalty)
    return scores_BV


def _draw(scores_BV: Tensor, params: Sequence[SamplingParams], uniform_B: Tensor) -> Tensor:
    """Inverse-CDF sampling, so that a row's draw depends on its own uniform and not on the rows beside it."""
    if all(p.greedy or (p.top_p == 1.0 and p.top_k <= 0) for p in params):
        return _invert(torch.softmax(scores_BV, dim=-1), uniform_B)
    sorted_BV, order_BV = scores_BV.sort(dim=-1, descending=True, stable=True)
    vocabulary = scores_BV.shape[-1]
    top_k_B1 = torch.tensor([[p.top_k if p.top_k > 0 else vocabulary] for p in params])
    top_p_B1 = torch.tensor([[p.top_p] for p in params], dtype=torch.float64)
    probs_BV = torch.softmax(sorted_BV.masked_fill(torch.arange(vocabulary) >= top_k_B1, float("-inf")), dim=-1)
    # The token that crosses top_p still belongs; top_p = 1 must keep all, whatever the sum rounds to.
    before_BV = probs_BV.double().cumsum(-1) - probs_BV
    probs_BV = probs_BV.masked_fill((before_BV >= top_p_B1) & (top_p_B1 < 1.0), 0.0)
    return order_BV.gather(-1, _invert(probs_BV, uniform_B)[:, None]).squeeze(-1)


def _invert(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """First token whose cumulative mass exceeds uniform * total mass; fp64, since fp32 sums lose rare tokens."""
    cdf_BV = probs_BV.double().cumsum(-1)
    total_B = cdf_BV[:, -1]
    # Strictly below the total, or the search runs past the last token with any mass.
    target_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(cdf_BV, target_B[:, None], right=True).squeeze(-1)
