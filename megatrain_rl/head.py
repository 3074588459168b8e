"""Log-probs and entropies from hidden states and the output matrix, chunk by chunk; [T, V] never exists.

The forward keeps one number per token, the log of the sum of exponentials; the backward recomputes a chunk's logits
and needs one more pass over them. All statistics are fp32.

Shapes: P predicted tokens of a pack, C tokens of a chunk of them, V vocabulary, H hidden size. With
z = logits / temperature and p = softmax(z):  d log p[y] / dz = onehot(y) - p,  d entropy / dz = -p (log p + entropy).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_rl.ops.matmul import add_product, mm_fp32

# Chunks are cut evenly and to a multiple of this, so that matrix products keep their fast shapes.
_CHUNK_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class HeadStats:
    """fp32 (P,) each: log-probs of the targets, entropies in nats or None, log of the sum of exponentials."""

    log_probs_P: Tensor
    entropy_P: Tensor | None
    lse_P: Tensor

    def __getitem__(self, rows: slice) -> "HeadStats":
        entropy_P = None if self.entropy_P is None else self.entropy_P[rows]
        return HeadStats(log_probs_P=self.log_probs_P[rows], entropy_P=entropy_P, lse_P=self.lse_P[rows])

    @classmethod
    def concatenated(cls, parts: list["HeadStats"], *, entropy: bool, device: torch.device) -> "HeadStats":
        """The parts one after the other; no parts give empty statistics on `device`. `entropy`: every part has them."""
        empty = torch.empty(0, dtype=torch.float32, device=device)
        entropies = [p.entropy_P for p in parts if p.entropy_P is not None]
        assert not entropy or len(entropies) == len(parts), "a part was made without entropies"
        return cls(
            log_probs_P=torch.cat([empty, *(p.log_probs_P for p in parts)]),
            entropy_P=torch.cat([empty, *entropies]) if entropy else None,
            lse_P=torch.cat([empty, *(p.lse_P for p in parts)]),
        )


class Head:
    """Output matrix and softmax on one chunk of tokens, whose logits exist meanwhile.

    compile: the elementwise parts as one kernel each, so that the logits are read once per pass (CUDA).
    """

    def __init__(self, *, compile: bool):
        self._compile = compile
        self._chunk_stats = torch.compile(_chunk_stats, dynamic=True) if compile else _chunk_stats
        self._grad_logits = torch.compile(_grad_logits, dynamic=True) if compile else _grad_logits

    def forward(
        self, hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor, temperature_C: Tensor, *, entropy: bool
    ) -> HeadStats:
        """Statistics of `targets_C`; hidden_CH: after the final norm."""
        log_probs_C, lse_C, entropy_C = self._chunk_stats(
            self._logits(hidden_CH, weight_VH), targets_C, temperature_C, entropy
        )
        return HeadStats(log_probs_P=log_probs_C, entropy_P=entropy_C, lse_P=lse_C)

    def backward(
        self,
        hidden_CH: Tensor,
        weight_VH: Tensor,
        targets_C: Tensor,
        temperature_C: Tensor,
        stats: HeadStats,
        grad_log_probs_C: Tensor,
        grad_entropy_C: Tensor | None,
        grad_weight_VH: Tensor,
    ) -> Tensor:
        """Returns the gradient (C, H) of the hidden states; that of the matrix is added to `grad_weight_VH` (fp32).

        stats: what `forward` returned for this chunk.
        """
        grad_CV = self._grad_logits(
            self._logits(hidden_CH, weight_VH),
            targets_C,
            temperature_C,
            stats.lse_P,
            grad_log_probs_C,
            None if grad_entropy_C is None else stats.entropy_P,
            grad_entropy_C,
            weight_VH.dtype,
        )
        add_product(grad_weight_VH, grad_CV.t(), hidden_CH)
        return grad_CV @ weight_VH

    def _logits(self, hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
        logits_CV = mm_fp32(hidden_CH, weight_VH.t())
        if self._compile:
            torch._dynamo.mark_static(logits_CV, 1)  # one kernel for chunks of every size, but for this vocabulary
        return logits_CV


def chunks(total: int, chunk: int) -> list[slice]:
    """Cut `total` tokens into slices of at most `chunk`: as few as that allows, of nearly equal size."""
    if total == 0:
        return []
    count = -(-total // chunk)
    even = -(-total // count)
    even = min(chunk, -(-even // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE)
    return [slice(start, min(start + even, total)) for start in range(0, total, even)]


def _chunk_stats(
    logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, log of the sum of exponentials, entropies (C,) from fp32 logits."""
    scaled_CV = logits_CV / temperature_C[:, None]
    lse_C = torch.logsumexp(scaled_CV, dim=-1)
    log_probs_C = scaled_CV.gather(1, targets_C[:, None])[:, 0] - lse_C
    if not entropy:
        return log_probs_C, lse_C, None
    log_p_CV = scaled_CV - lse_C[:, None]
    return log_probs_C, lse_C, -(log_p_CV.exp() * log_p_CV).sum(-1)


def _grad_logits(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor,
    lse_C: Tensor,
    grad_log_probs_C: Tensor,
    entropy_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient (C, V) of the logits, in `dtype`. One pass: every element needs its own logit and numbers of its row.

    The entropies and their gradient are both there or both None.
    """
    log_p_CV = logits_CV / temperature_C[:, None] - lse_C[:, None]
    if entropy_C is None or grad_entropy_C is None:
        grad_CV = log_p_CV.exp() * -grad_log_probs_C[:, None]
    else:
        # -(g_logp + g_entropy (log p + entropy)) p, the two terms of both derivatives that carry a factor p
        coefficient_CV = (log_p_CV + entropy_C[:, None]) * grad_entropy_C[:, None] + grad_log_probs_C[:, None]
        grad_CV = -log_p_CV.exp() * coefficient_CV
    # a comparison and not a scatter, which would be a pass of its own
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device)[None] == targets_C[:, None]
    grad_CV = grad_CV + torch.where(is_target_CV, grad_log_probs_C[:, None], 0.0)
    return (grad_CV / temperature_C[:, None]).to(dtype)
