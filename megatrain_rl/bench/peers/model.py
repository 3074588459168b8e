"""The model the other engines train: transformers' own modules, with this package's packed attention and chunked head.

Both are given to them on purpose. Without the attention they would pad or run sequences one by one; without the head
their logits would not fit. What is left to compare is how weights, gradients and optimizer state move.

Shapes: T tokens of a pack, V vocabulary, H hidden size.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatrain_rl.batch import PackedBatch
from megatrain_rl.head import Head, chunks
from megatrain_rl.model.attention import ATTENTION_NAME, register_attention, resolve_backend

HEAD_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One pack on the device. coefficient_T: derivative of the loss with respect to each log-prob."""

    tokens_1T: Tensor
    positions_1T: Tensor
    targets_T: Tensor
    temperature_T: Tensor
    coefficient_T: Tensor
    attention: dict[str, Any]

    @classmethod
    def of(cls, pack: PackedBatch, coefficient_T: Tensor, device: torch.device, dtype: torch.dtype) -> "MicroBatch":
        backend = resolve_backend("auto", device, dtype)
        return cls(
            tokens_1T=pack.tokens_T.to(device)[None],
            positions_1T=pack.positions_T.to(device)[None],
            targets_T=pack.targets_T.to(device),
            temperature_T=pack.temperature_T.to(device),
            coefficient_T=(coefficient_T * pack.predict_T).to(device),
            attention=dict(
                cu_seqlens=pack.cu_seqlens.to(device),
                sequence_bounds=tuple(pack.cu_seqlens.tolist()) if backend == "sdpa" else (),
                max_seqlen=pack.max_seqlen,
                attention_backend=backend,
            ),
        )


class PeerModel(nn.Module):
    """`forward` returns the loss: sum(coefficient_T * log_prob_T)."""

    def __init__(self, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device, seed: int):
        super().__init__()
        register_attention()
        torch.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa", dtype=dtype)
        model.config._attn_implementation = ATTENTION_NAME
        model.train()
        self.decoder = model.model
        self.lm_head = ChunkedHead(model.lm_head.weight, Head(compile=device.type == "cuda"))
        self.tied = model.lm_head.weight is model.model.embed_tokens.weight

    def forward(self, batch: MicroBatch) -> Tensor:
        hidden_1TH = self.decoder(
            input_ids=batch.tokens_1T, position_ids=batch.positions_1T, use_cache=False, **batch.attention
        ).last_hidden_state
        return self.lm_head(hidden_1TH[0], batch.targets_T, batch.temperature_T, batch.coefficient_T)


class ChunkedHead(nn.Module):
    """A module that owns the output matrix, so that an engine's hooks fetch it for `forward` like any other."""

    def __init__(self, weight: nn.Parameter, head: Head):
        super().__init__()
        self.weight = weight
        self._head = head

    def forward(self, hidden_TH: Tensor, targets_T: Tensor, temperature_T: Tensor, coefficient_T: Tensor) -> Tensor:
        return _WeightedLogProbs.apply(self._head, hidden_TH, self.weight, targets_T, temperature_T, coefficient_T)


class _WeightedLogProbs(torch.autograd.Function):
    """Loss and gradient of the head in one pass. The gradient is known as soon as the loss is, so forward computes it
    and backward needs no matrix: an engine may take the matrix away in between."""

    @staticmethod
    def forward(ctx, head: Head, hidden_TH, weight_VH, targets_T, temperature_T, coefficient_T) -> Tensor:
        sum_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        grads, loss = [], torch.zeros((), device=weight_VH.device)
        for c in chunks(len(hidden_TH), HEAD_CHUNK):
            inputs = (hidden_TH[c], weight_VH, targets_T[c], temperature_T[c])
            stats = head.forward(*inputs, entropy=False)
            loss += (stats.log_probs_P * coefficient_T[c]).sum()
            grads.append(head.backward(*inputs, stats, coefficient_T[c], None, sum_VH))
        ctx.save_for_backward(torch.cat(grads), sum_VH.to(weight_VH.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden_TH, grad_weight_VH = ctx.saved_tensors
        # a loss of several packs is summed, so this is 1 but for an engine's own scaling
        return None, grad_hidden_TH * grad_loss, grad_weight_VH * grad_loss, None, None, None
