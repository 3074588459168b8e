"""Log-probs and entropies from hidden states and the output matrix, chunk by chunk; [T, V] never exists.

The forward keeps nothing; the backward recomputes a chunk's logits. All statistics are fp32.

Shapes: P predicted tokens, C tokens of a chunk, V vocabulary, H hidden size. With z = logits / temperature and
p = softmax(z):  d log p[y] / dz = onehot(y) - p,  d entropy / dz = -p (log p + entropy).
"""

import torch
from torch import Tensor


def head_forward(
    hidden_PH: Tensor, weight_VH: Tensor, targets_P: Tensor, temperature_P: Tensor, *, chunk: int, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """fp32 log-probs (P,) of `targets_P`, and entropies (P,) in nats when asked for."""
    log_probs_P = torch.empty(hidden_PH.shape[0], dtype=torch.float32, device=hidden_PH.device)
    entropy_P = torch.empty_like(log_probs_P) if entropy else None
    for c in _chunks(hidden_PH.shape[0], chunk):
        scaled_CV = _scaled_logits(hidden_PH[c], weight_VH, temperature_P[c])
        lse_C = torch.logsumexp(scaled_CV, dim=-1)
        log_probs_P[c] = scaled_CV.gather(1, targets_P[c, None])[:, 0] - lse_C
        if entropy_P is not None:
            log_p_CV = scaled_CV.sub_(lse_C[:, None])
            entropy_P[c] = -(log_p_CV.exp().mul_(log_p_CV)).sum(-1)
    return log_probs_P, entropy_P


def head_backward(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    targets_P: Tensor,
    temperature_P: Tensor,
    grad_log_probs_P: Tensor,
    grad_entropy_P: Tensor | None,
    grad_weight_VH: Tensor,
    *,
    chunk: int,
) -> Tensor:
    """Gradient (P, H) of the hidden states; that of the matrix is added to `grad_weight_VH` (fp32)."""
    grad_hidden_PH = torch.empty_like(hidden_PH)
    for c in _chunks(hidden_PH.shape[0], chunk):
        grad_CV = _grad_logits(
            _scaled_logits(hidden_PH[c], weight_VH, temperature_P[c]),
            targets_P[c],
            grad_log_probs_P[c],
            None if grad_entropy_P is None else grad_entropy_P[c],
        )
        grad_CV = grad_CV.div_(temperature_P[c, None]).to(weight_VH.dtype)
        grad_hidden_PH[c] = grad_CV @ weight_VH
        _add_outer(grad_weight_VH, grad_CV, hidden_PH[c])
    return grad_hidden_PH


def _chunks(total: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, total)) for start in range(0, total, chunk)]


def _scaled_logits(hidden_CH: Tensor, weight_VH: Tensor, temperature_C: Tensor) -> Tensor:
    """fp32 logits (C, V) over temperature. On CUDA the matrix product itself returns fp32."""
    if hidden_CH.is_cuda and hidden_CH.dtype == torch.bfloat16:
        logits_CV = torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits_CV = (hidden_CH @ weight_VH.t()).float()
    return logits_CV.div_(temperature_C[:, None])


def _grad_logits(
    scaled_CV: Tensor, targets_C: Tensor, grad_log_probs_C: Tensor, grad_entropy_C: Tensor | None
) -> Tensor:
    """Gradient (C, V) with respect to the scaled logits; reuses their memory."""
    log_p_CV = scaled_CV.sub_(torch.logsumexp(scaled_CV, dim=-1, keepdim=True))
    if grad_entropy_C is None:
        grad_CV = log_p_CV.exp_().mul_(-grad_log_probs_C[:, None])
    else:
        p_CV = log_p_CV.exp()
        entropy_C = -(p_CV * log_p_CV).sum(-1)
        # -(g_logp + g_entropy (log p + entropy)) p, the two terms of both derivatives that carry a factor p
        coefficient_CV = log_p_CV.add_(entropy_C[:, None]).mul_(grad_entropy_C[:, None]).add_(grad_log_probs_C[:, None])
        grad_CV = p_CV.mul_(coefficient_CV).neg_()
    return grad_CV.scatter_add_(1, targets_C[:, None], grad_log_probs_C[:, None])


def _add_outer(grad_weight_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor) -> None:
    """grad_weight += grad^T hidden, summed in fp32."""
    if grad_CV.is_cuda and grad_CV.dtype == torch.bfloat16:
        torch.addmm(grad_weight_VH, grad_CV.t(), hidden_CH, out_dtype=torch.float32, out=grad_weight_VH)
    else:
        grad_weight_VH.add_(grad_CV.t() @ hidden_CH)
