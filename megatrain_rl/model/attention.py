"""Causal attention over a pack of sequences laid end to end; no token sees another sequence.

Registered with transformers under `ATTENTION_NAME`; decoder layers hand the keyword arguments of
`template.LayerInputs.attention` through to it. Shapes: T tokens, N query heads, K key-value heads, D head size.
transformers passes (1, heads, T, D) and expects (1, T, N, D).
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
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others,
) -> tuple[Tensor, None]:
    """The function that transformers' layers call as their attention; the signature is transformers'.

    A feature that is not here (soft caps, sinks, position biases, attention that is not causal) is a ValueError.

    cu_seqlens: int32 (S+1,) on the device. sequence_bounds: the same on the host, read by the SDPA path only (empty for
    the others, so that compiled graphs do not specialise on it).
    """
    assert attention_mask is None and dropout == 0.0
    unknown = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if unknown:
        raise ValueError(f"the model's attention wants {', '.join(unknown)}: not supported, choose another model")
    if is_causal is False or not module.is_causal:
        raise ValueError("the model's attention is not causal (is_causal=False): not supported, choose another model")
    if attention_backend == "sdpa":
        return _sdpa(query, key, value, scaling, sequence_bounds, sliding_window), None
    query_TND, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    if attention_backend == "varlen":
        out_TND = varlen_attn(
            query_TND, key_TKD, value_TKD, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
            scale=scaling, window_size=window, **_VARLEN_GQA,
        )  # fmt: skip
        assert isinstance(out_TND, Tensor)  # a tuple only when asked for more
    else:
        from flash_attn import flash_attn_varlen_func

        out_TND = flash_attn_varlen_func(
            query_TND, key_TKD, value_TKD, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
            softmax_scale=scaling, causal=True, window_size=window,
        )  # fmt: skip
    return out_TND[None], None


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    sequence_bounds: tuple[int, ...],
    sliding_window: int | None,
) -> Tensor:
    """Exact path: each sequence alone through torch's scaled dot product attention."""
    outs = []
    for start, end in itertools.pairwise(sequence_bounds):
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        mask = None
        if sliding_window is not None and sliding_window < end - start:
            distance = torch.arange(end - start, device=query.device)
            distance = distance[:, None] - distance[None, :]
            mask = (distance >= 0) & (distance < sliding_window)
        outs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outs, dim=2).transpose(1, 2)
