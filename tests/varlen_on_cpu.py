"""torch's variable-length attention on a CPU, for tests of what is built around it: forward and backward by formula.

Importing this registers both for the process; the package itself never asks for them on a CPU.
"""

import itertools

import torch
import torch.nn.attention.varlen  # defines the operators


def _sequences(query_TND, key_TKD, cu_seqlens, scale):
    """(rows, heads sharing a key head, masked scores (N, L, L)) of each sequence."""
    group = query_TND.shape[1] // key_TKD.shape[1]
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        rows = slice(start, end)
        scores = torch.einsum("tnd,snd->nts", query_TND[rows], key_TKD[rows].repeat_interleave(group, 1)) * scale
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        yield rows, group, scores.masked_fill(future, float("-inf"))


def _scale(*arguments) -> float:
    return next(x for x in arguments if isinstance(x, float))


@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
def _forward(query, key, value, cu_seq_q, cu_seq_k, max_q, *rest, **options):
    assert max_q >= cu_seq_q.diff().max(), "the kernel would not look further"
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    for rows, group, scores in _sequences(query, key, cu_seq_q, _scale(*rest, *options.values())):
        out[rows] = torch.einsum("nts,snd->tnd", scores.softmax(-1), value[rows].repeat_interleave(group, 1))
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


@torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")
def _backward(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, *rest, **options):
    assert max_q >= cu_seq_q.diff().max()
    scale = _scale(*rest, *options.values())
    grads = [torch.empty_like(x) for x in (query, key, value)]
    for rows, group, scores in _sequences(query, key, cu_seq_q, scale):
        p = scores.softmax(-1)
        grad_p = torch.einsum("tnd,snd->nts", grad_out[rows], value[rows].repeat_interleave(group, 1))
        grad_scores = p * (grad_p - (grad_p * p).sum(-1, keepdim=True)) * scale
        grads[0][rows] = torch.einsum("nts,snd->tnd", grad_scores, key[rows].repeat_interleave(group, 1))
        length = rows.stop - rows.start
        for grad, per_head in (
            (grads[1], torch.einsum("nts,tnd->snd", grad_scores, query[rows])),
            (grads[2], torch.einsum("nts,tnd->snd", p, grad_out[rows])),
        ):
            grad[rows] = per_head.view(length, key.shape[1], group, -1).sum(2)
    return tuple(grads)
