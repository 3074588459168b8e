"""The oracle that the streaming trainer must equal: plain Hugging Face model, autograd, torch.optim.AdamW.

Also the baseline of the benchmarks. Sequences run one by one, unpadded, so no mask or packing code is shared with what
is tested.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class OracleStats:
    """Per sequence: log p(token t+1) and entropy at each of the first L-1 tokens, with their graph."""

    log_probs: list[Tensor]
    entropies: list[Tensor]


def token_stats(model: nn.Module, sequences: list[Tensor], temperature: list[float]) -> OracleStats:
    log_probs, entropies = [], []
    for sequence, t in zip(sequences, temperature, strict=True):
        sequence = sequence.to(next(model.parameters()).device)
        logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1].float() / t
        log_p = torch.log_softmax(logits, dim=-1)
        log_probs.append(log_p.gather(1, sequence[1:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return OracleStats(log_probs=log_probs, entropies=entropies)


def log_probs_T(model: nn.Module, sequences: list[Tensor]) -> Tensor:
    """(T,) on the CPU, of the sequences laid end to end as one pack, at temperature 1: 0 at each one's last token."""
    truth = token_stats(model, sequences, [1.0] * len(sequences)).log_probs
    return torch.cat([torch.cat([t.detach().cpu(), torch.zeros(1)]) for t in truth])


def adamw_step(model: nn.Module, optimizer: torch.optim.Optimizer, clip_grad: float | None) -> float:
    """Clip, step, zero; returns the norm before clipping."""
    limit = clip_grad if clip_grad else float("inf")
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()
