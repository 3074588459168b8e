"""torch's variable-length attention on a CPU, for tests of what is built around it: forward and backward by formula.

As in the kernel, the queries of a sequence are the last of its tokens where there are fewer of them than of keys.

Importing this registers both for the process; the package itself never asks for them on a CPU.
"""

import itertools

import torch
import torch.nn.attention.varlen  # defines the operators


def _sequences(query_CND, key_TKD, cu_queries, cu_keys, scale):
    """(its queries, its keys, heads sharing a key head, masked scores (N, queries, keys)) of each sequence."""
    group = query_CND.shape[1] // key_TKD.shape[1]
    bounds = (itertools.pairwise(each.tolist()) for each in (cu_queries, cu_keys))
    for (q0, q1), (k0, k1) in zip(*bounds, strict=True):
        queries, keys = slice(q0, q1), slice(k0, k1)
        scores = torch.einsum("cnd,tnd->nct", query_CND[queries], key_TKD[keys].repeat_interleave(group, 1)) * scale
        earlier = (k1 - k0) - (q1 - q0)
        future = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).triu(1 + earlier)
        yield queries, keys, group, scores.masked_fill(future, float("-inf"))


def _scale(*arguments) -> float:
    return next(x for x in arguments if isinstance(x, float))


@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
def _forward(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *rest, **options):
    _check(cu_seq_q, cu_seq_k, max_q, max_k)
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    for queries, keys, group, scores in _sequences(query, key, cu_seq_q, cu_seq_k, _scale(*rest, *options.values())):
        out[queries] = torch.einsum("nct,tnd->cnd", scores.softmax(-1), value[keys].repeat_interleave(group, 1))
        lse[:, queries] = scores.logsumexp(-1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


@torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")
def _backward(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, *rest, **options):
    _check(cu_seq_q, cu_seq_k, max_q, max_k)
    scale = _scale(*rest, *options.values())
    grads = [torch.empty_like(x) for x in (query, key, value)]
    for queries, keys, group, scores in _sequences(query, key, cu_seq_q, cu_seq_k, scale):
        p = scores.softmax(-1)
        grad_p = torch.einsum("cnd,tnd->nct", grad_out[queries], value[keys].repeat_interleave(group, 1))
        grad_scores = p * (grad_p - (grad_p * p).sum(-1, keepdim=True)) * scale
        grads[0][queries] = torch.einsum("nct,tnd->cnd", grad_scores, key[keys].repeat_interleave(group, 1))
        for grad, per_head in (
            (grads[1], torch.einsum("nct,cnd->tnd", grad_scores, query[queries])),
            (grads[2], torch.einsum("nct,cnd->tnd", p, grad_out[queries])),
        ):
            grad[keys] = per_head.view(keys.stop - keys.start, key.shape[1], group, -1).sum(2)
    return tuple(grads)


def _check(cu_seq_q, cu_seq_k, max_q, max_k) -> None:
    assert max_q >= cu_seq_q.diff().max() and max_k >= cu_seq_k.diff().max(), "the kernel would not look further"
