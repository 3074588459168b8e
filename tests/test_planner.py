"""Refusals before anything is allocated: each names the setting to change."""

import dataclasses

import pytest
import tiny

from megatrain_rl.batch import pack_sequences
from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.model.decoder import decoder_spec
from megatrain_rl.objectives import NegativeLogLikelihood
from megatrain_rl.planner import check_packs, make_plan


@pytest.fixture(scope="module")
def qwen_7b():
    return decoder_spec(shape_config("qwen2.5-7b"))


def plan(spec, **knobs):
    return make_plan(spec, StreamConfig(host_budget_gb=130, **knobs), AdamWConfig(), reference=False)


def test_7b_fits_nine_gb(qwen_7b):
    made = plan(qwen_7b)
    assert made.pack_tokens == 8192 and made.max_pack_tokens >= 8192
    assert made.gpu_cap_bytes < 9e9
    assert 99e9 < made.host_bytes < 108e9  # 14 bytes a parameter


def test_a_smaller_budget_gives_smaller_packs(qwen_7b):
    small = plan(qwen_7b, gpu_budget_gb=7)
    assert 256 <= small.max_pack_tokens < plan(qwen_7b).max_pack_tokens
    assert 64 <= small.head_chunk < plan(qwen_7b).head_chunk


def test_budget_too_small_names_what_would_do(qwen_7b):
    with pytest.raises(
        ValueError, match=r"gpu_budget_gb=3 is too small for this model: it needs at least (\d+\.?\d*)"
    ) as error:
        plan(qwen_7b, gpu_budget_gb=3)
    needed = float(str(error.value).split("at least ")[1].split(";")[0])
    assert plan(qwen_7b, gpu_budget_gb=needed).pack_tokens >= 1  # the advice works


def test_pack_tokens_beyond_the_budget(qwen_7b):
    limit = plan(qwen_7b).max_pack_tokens
    with pytest.raises(ValueError, match=f"pack_tokens={limit + 1} does not fit gpu_budget_gb=9: at most {limit}"):
        plan(qwen_7b, pack_tokens=limit + 1)


def test_host_too_small_states_the_shortfall(qwen_7b):
    with pytest.raises(ValueError, match=r"needs 10\d\.\d GB of host RAM and 64\.0 GB are available: 4\d\.\d GB short"):
        make_plan(qwen_7b, StreamConfig(host_budget_gb=64), AdamWConfig(), reference=False)


def test_sequence_beyond_the_budget(tmp_path):
    """A sequence longer than pack_tokens runs in a pack of its own; one longer than the budget holds is refused."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path), pack_tokens=16)
    data = tiny.sequences((40, 8, 8))
    packs = pack_sequences(data, max_tokens=trainer.pack_tokens)
    assert [p.num_tokens for p in packs] == [40, 16]
    assert len(trainer.forward_backward(packs, NegativeLogLikelihood(packs)).losses) == 2
    small = dataclasses.replace(trainer.plan, max_pack_tokens=39)
    with pytest.raises(
        ValueError, match="a sequence of 40 tokens does not fit gpu_budget_gb=9: at most 39; raise gpu_budget_gb"
    ):
        check_packs(small, trainer.config, packs)
    trainer.plan = small
    for call in (
        lambda: trainer.log_probs(packs),
        lambda: trainer.forward_backward(packs, NegativeLogLikelihood(packs)),
    ):
        with pytest.raises(ValueError, match="does not fit gpu_budget_gb"):
            call()
    trainer.close()


def test_layer_inputs_beyond_the_host(tmp_path):
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    trainer.plan = dataclasses.replace(trainer.plan, host_limit_bytes=trainer.plan.host_bytes + 1000)
    with pytest.raises(ValueError, match="layer inputs of this mini-batch need .* lower ppo_mini_batch_size"):
        trainer.log_probs(tiny.packs(tiny.sequences()))
    trainer.close()
