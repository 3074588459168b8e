"""A model of the supported families is what transformers computes from its config; what would be ignored is refused."""

import oracle
import pytest
import tiny
import torch
from torch import nn
from transformers import LlamaForCausalLM

from megatrain_rl.model.attention import packed_attention
from megatrain_rl.model.decoder import decoder_spec

# Config keys that change the arithmetic of some model, also such that these families' classes do not read.
FEATURES = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tensor parallel pretraining": {"pretraining_tp": 2},
    "another activation": {"hidden_act": "gelu_pytorch_tanh"},
    "eps": {"rms_norm_eps": 0.1},
    "wide heads": {"head_dim": 32},
    "partial rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    "multipliers": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.2,
        "attention_multiplier": 0.01,
        "logits_scaling": 8.0,
        "logit_scale": 0.06,
        "query_pre_attn_scalar": 7,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 5.0,
    },
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_config_means_what_transformers_makes_of_it(tmp_path, family, feature):
    model = tiny.model(tiny.config(family, layers=2, **FEATURES[feature]))
    data = tiny.sequences((30, 5, 17))
    trainer = tiny.trainer(tiny.saved(model, tmp_path), pack_tokens=64)
    (stats,) = trainer.log_probs(tiny.packs(data, max_tokens=64))
    assert torch.allclose(stats.log_probs_T, oracle.log_probs_T(model, data), atol=2e-5)
    trainer.close()


def test_a_parameter_frozen_by_the_models_class_is_refused(monkeypatch):
    construct = LlamaForCausalLM.__init__

    def frozen(self, config):
        construct(self, config)
        self.model.embed_tokens.requires_grad_(False)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", frozen)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight.*requires_grad=False"):
        decoder_spec(tiny.config("llama"))


def attend(module=None, **keywords):
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    if module is None:
        module = nn.Module()
        module.is_causal = True
    packed = dict(cu_seqlens=torch.tensor([0, 6]).int(), sequence_bounds=(0, 6), max_seqlen=6, attention_backend="sdpa")
    return packed_attention(module, query, key, key, None, scaling=0.3, **packed, **keywords)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "head_mask", "attention_sink"])
def test_an_attention_feature_that_is_not_here_is_refused(name):
    with pytest.raises(ValueError, match=name):
        attend(**{name: torch.ones(4)})
    attend(**{name: None})


def test_attention_that_is_not_causal_is_refused():
    with pytest.raises(ValueError, match="is_causal"):
        attend(is_causal=False)
    module = nn.Module()
    module.is_causal = False
    with pytest.raises(ValueError, match="is_causal"):
        attend(module)


def test_what_changes_no_result_passes():
    out, _ = attend(is_causal=True, position_ids=torch.arange(6)[None], use_cache=False, dropout=0.0)
    assert out.shape == (1, 6, 4, 8)
