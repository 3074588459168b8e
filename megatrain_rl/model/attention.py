"""Causal attention over a pack of sequences laid end to end; no token sees another sequence.

Where sequences share a prompt, layers compute it once. Keys and values are few in grouped-query attention, so those of
the prompt are copied in front of each answer; the queries are not: each answer's attend to the prompt's copy and to
their own, aligned at the end, as the kernels do with fewer queries than keys.

Registered with transformers under `ATTENTION_NAME`; decoder layers hand the keyword arguments of
`template.LayerInputs.attention` through to it. Shapes: T tokens of the sequences, C of them that are computed (all T
without shared prompts), S sequences, N query heads, K key-value heads, D head size. transformers passes
(1, heads, C, D) and expects (1, C, N, D).
"""

import inspect
import itertools
from typing import Literal, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

ATTENTION_NAME = "megatrain_packed"
Backend = Literal["varlen", "flash_attn", "sdpa"]


class _VarlenOptions(TypedDict, total=False):
    enable_gqa: bool


# What transformers' layers hand to their attention function beside the named arguments, and what does not change its
# result here: positions are in the rotary tables already, and there is no cache.
_HARMLESS = ("position_ids", "cache_position", "use_cache", "past_key_values", "output_attentions")

# torch 2.11's kernel takes fewer key-value heads as they come; later versions want to be told.
_VARLEN_GQA: _VarlenOptions = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def resolve_backend(setting: Literal["auto"] | Backend, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend that the `attention` setting stands for; this function picks only for "auto".

    A setting that cannot run with this device and dtype is a ValueError, and so is a package that is not installed.
    """
    if setting == "auto":
        return "varlen" if device.type == "cuda" and dtype == torch.bfloat16 else "sdpa"
    if setting in ("varlen", "flash_attn") and (device.type != "cuda" or dtype != torch.bfloat16):
        raise ValueError(f"attention={setting} needs CUDA and param_dtype=bfloat16; set attention=auto or sdpa")
    if setting == "flash_attn":
        try:
            import flash_attn  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "attention=flash_attn: the flash-attn package is not installed; set attention=auto"
            ) from error
    return setting


def register_attention() -> None:
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seqlens: Tensor,
    sequence_bounds: tuple[int, ...],
    max_seqlen: int,
    attention_backend: Backend,
    keys_T: Tensor | None = None,
    cu_queries: Tensor | None = None,
    query_bounds: tuple[int, ...] = (),
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others,
) -> tuple[Tensor, None]:
    """The function that transformers' layers call as their attention; the signature is transformers'.

    A feature that is not here (soft caps, sinks, position biases, attention that is not causal) is a ValueError.

    cu_seqlens: int32 (S+1,) on the device. sequence_bounds: the same on the host, read by the SDPA path only (empty for
        the others, so that compiled graphs do not specialise on it).
    keys_T: int64, the computed token whose keys and values stand at each token of the sequences; None where every token
        is computed. cu_queries, query_bounds: with it, cu_seqlens and sequence_bounds of the computed tokens alone.
    """
    assert attention_mask is None and dropout == 0.0
    unknown = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if unknown:
        raise ValueError(f"the model's attention wants {', '.join(unknown)}: not supported, choose another model")
    if is_causal is False or not module.is_causal:
        raise ValueError("the model's attention is not causal (is_causal=False): not supported, choose another model")
    query_CND, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    if keys_T is None or cu_queries is None:
        cu_queries, query_bounds = cu_seqlens, sequence_bounds
    else:
        key_TKD, value_TKD = _Copies.apply(key_TKD, keys_T), _Copies.apply(value_TKD, keys_T)
    if attention_backend == "sdpa":
        bounds = (query_bounds, sequence_bounds)
        return _sdpa(query_CND, key_TKD, value_TKD, scaling, bounds, sliding_window)[None], None
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    if attention_backend == "varlen":
        out_CND = varlen_attn(
            query_CND, key_TKD, value_TKD, cu_queries, cu_seqlens, max_seqlen, max_seqlen,
            scale=scaling, window_size=window, **_VARLEN_GQA,
        )  # fmt: skip
        assert isinstance(out_CND, Tensor)  # a tuple only when asked for more
    else:
        from flash_attn import flash_attn_varlen_func

        out_CND = flash_attn_varlen_func(
            query_CND, key_TKD, value_TKD, cu_queries, cu_seqlens, max_seqlen, max_seqlen,
            softmax_scale=scaling, causal=True, window_size=window,
        )  # fmt: skip
    return out_CND[None], None


class _Copies(torch.autograd.Function):
    """values (C, K, D) at `places_T`: (T, K, D). The gradients of a token's copies are summed in fp32."""

    @staticmethod
    def forward(ctx, values: Tensor, places_T: Tensor) -> Tensor:
        ctx.save_for_backward(places_T)
        ctx.num_values = values.shape[0]
        return values.index_select(0, places_T)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (places_T,) = ctx.saved_tensors
        total = grad.new_zeros((ctx.num_values, *grad.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, places_T, grad.float()).to(grad.dtype), None


def _sdpa(
    query_CND: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    scaling: float,
    bounds: tuple[tuple[int, ...], tuple[int, ...]],
    sliding_window: int | None,
) -> Tensor:
    """Exact path: each sequence alone through torch's scaled dot product attention. bounds: of queries, of keys."""
    outs = []
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(each) for each in bounds), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (query_CND[q0:q1], key_TKD[k0:k1], value_TKD[k0:k1]))
        num_queries, num_keys = q1 - q0, k1 - k0
        mask = None
        if num_queries < num_keys or (sliding_window is not None and sliding_window < num_keys):
            distance = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
            distance = distance - torch.arange(num_keys, device=q.device)[None]
            mask = (distance >= 0) & (distance < (sliding_window or num_keys))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
