"""Attention on CUDA: as close to fp32 as eager, called as its interfaces say, refused where it cannot run."""

import sys
import types

import oracle
import pytest
import tiny
import torch
from torch.nn.attention.varlen import varlen_attn

from megatrain_rl.model.attention import _VARLEN_GQA

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_attention_backends_agree(tmp_path, backend):
    """bf16 log-probs of either backend stay as close to fp32 as eager's."""
    model = tiny.model(tiny.config(), dtype=torch.bfloat16, device="cuda")
    data = tiny.sequences((64, 100, 33))
    trainer = tiny.trainer(
        tiny.saved(model, tmp_path), device="cuda", attention=backend, param_dtype="bfloat16", pack_tokens=256
    )

    (stats,) = trainer.log_probs(tiny.packs(data, max_tokens=256))
    eager = oracle.token_stats(model, data, [1.0] * 3).log_probs
    exact = oracle.token_stats(model.float(), data, [1.0] * 3).log_probs
    flat = [torch.cat([torch.cat([x.detach().cpu(), torch.zeros(1)]) for x in each]) for each in (eager, exact)]
    assert (stats.log_probs_T - flat[1]).norm() <= 1.1 * (flat[0] - flat[1]).norm()
    trainer.close()


def test_flash_attn_is_called_as_its_interface_says(tmp_path, monkeypatch):
    """flash-attn need not be installed: a stand-in with its documented signature computes by torch's varlen kernel."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1),
    ):  # fmt: skip
        assert causal and dropout_p == 0.0
        return varlen_attn(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=softmax_scale,
            window_size=(window_size[0], 0), **_VARLEN_GQA,
        )  # fmt: skip

    stand_in = types.ModuleType("flash_attn")
    stand_in.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    directory = tiny.saved(tiny.model(tiny.config(), dtype=torch.bfloat16), tmp_path)
    results = []
    for attention in ("varlen", "flash_attn"):
        trainer = tiny.trainer(directory, device="cuda", attention=attention, param_dtype="bfloat16")
        results.append([s.log_probs_T for s in trainer.log_probs(tiny.packs(tiny.sequences()))])
        trainer.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiling_the_exact_attention_path_is_refused(tmp_path):
    directory = tiny.saved(tiny.model(tiny.config(layers=3), dtype=torch.bfloat16), tmp_path)
    with pytest.raises(ValueError, match=r"^compile=true .*attention=varlen"):
        tiny.trainer(directory, device="cuda", param_dtype="bfloat16", attention="sdpa", compile=True)
