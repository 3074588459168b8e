"""Refusals before anything is allocated: each names the setting to change."""

import dataclasses
import re

import pytest
import tiny
import torch

from megatrain_rl.batch import pack_sequences
from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.model.decoder import decoder_spec
from megatrain_rl.objectives import NegativeLogLikelihood
from megatrain_rl.planner import check_packs, compiles, make_plan
from megatrain_rl.streaming.schedule import LayerSchedule


@pytest.fixture(scope="module")
def qwen_7b():
    return decoder_spec(shape_config("qwen2.5-7b"))


def plan(spec, **knobs):
    return make_plan(spec, StreamConfig(host_budget_gb=130, **knobs), AdamWConfig(), reference=False)


def test_7b_fits_nine_gb(qwen_7b):
    made = plan(qwen_7b)
    assert made.pack_tokens == 10240 <= made.max_pack_tokens
    assert made.ring_in_head and made.head_chunk(made.pack_tokens) >= 1024
    assert made.gpu_cap_bytes < 9e9
    assert 99e9 < made.host_bytes < 108e9  # 14 bytes a parameter


def test_a_smaller_budget_gives_smaller_packs(qwen_7b):
    small = plan(qwen_7b, gpu_budget_gb=7)
    assert 256 <= small.max_pack_tokens < plan(qwen_7b).max_pack_tokens
    assert 64 <= small.head_chunk(4096) < plan(qwen_7b).head_chunk(4096)


def test_budget_too_small_names_what_would_do(qwen_7b):
    with pytest.raises(ValueError, match=r"^gpu_budget_gb=3 ") as error:
        plan(qwen_7b, gpu_budget_gb=3)
    needed = float(re.search(r"at least (\d+\.?\d*)", str(error.value))[1])
    assert plan(qwen_7b, gpu_budget_gb=needed).pack_tokens >= 1  # the advice works


def test_pack_tokens_beyond_the_budget(qwen_7b):
    limit = plan(qwen_7b).max_pack_tokens
    with pytest.raises(ValueError, match=rf"^pack_tokens={limit + 1} .*gpu_budget_gb=9\b.*\b{limit}\b"):
        plan(qwen_7b, pack_tokens=limit + 1)


def test_host_too_small_states_the_shortfall(qwen_7b):
    with pytest.raises(ValueError, match=r"\b10\d\.\d GB.*\b64\.0 GB.*\b4\d\.\d GB.*host_budget_gb"):
        make_plan(qwen_7b, StreamConfig(host_budget_gb=64), AdamWConfig(), reference=False)


def test_sequence_beyond_the_budget(tmp_path):
    """A sequence longer than pack_tokens runs in a pack of its own; one longer than the budget holds is refused."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path), pack_tokens=16)
    data = tiny.sequences((40, 8, 8))
    packs = pack_sequences(data, max_tokens=trainer.pack_tokens)
    assert [p.num_tokens for p in packs] == [40, 16]
    assert len(trainer.forward_backward(packs, NegativeLogLikelihood(packs)).losses) == 2
    small = dataclasses.replace(trainer.plan, max_pack_tokens=39)
    with pytest.raises(ValueError, match=r"a sequence of 40 tokens .*gpu_budget_gb=9\b.*\b39\b.*raise gpu_budget_gb"):
        check_packs(small, trainer.config, packs, vocab_size=tiny.VOCAB)
    trainer.plan = small
    for call in (
        lambda: trainer.log_probs(packs),
        lambda: trainer.forward_backward(packs, NegativeLogLikelihood(packs)),
    ):
        with pytest.raises(ValueError, match="gpu_budget_gb="):
            call()
    trainer.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_sweeps_give_the_update_of_one(tmp_path, dtype):
    """Layer inputs beyond host RAM run in several sweeps: the same statistics, and nearly the same gradients.

    The gradients differ by the rounding of the sums that come back in between.
    """
    types = dict(param_dtype=dtype, grad_dtype=dtype)
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config(tied=True)), tmp_path), **types)
    data = tiny.sequences()
    packs, objective = tiny.packs(data), tiny.WeightedLoss(tiny.token_weights(data))
    whole = trainer.forward_backward(packs, objective)
    gradients = {n: g.float().clone() for n, g in trainer.named_gradients()}
    norm = trainer.optim_step().grad_norm
    trainer.load_named_parameters(tiny.model(tiny.config(tied=True)).named_parameters())
    one_pack = (
        LayerSchedule(5, 1, train=True).num_slots
        * max(p.num_tokens for p in packs)
        * 64
        * (4 if dtype == "float32" else 2)
    )
    trainer.plan = dataclasses.replace(trainer.plan, host_limit_bytes=trainer.plan.host_bytes + one_pack)
    assert trainer.num_sweeps(packs, train=True) == len(packs) >= 3
    cut = trainer.forward_backward(packs, objective)
    assert cut.losses == whole.losses
    assert all(torch.equal(a.log_probs_T, b.log_probs_T) for a, b in zip(cut.stats, whole.stats, strict=True))
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    total = torch.cat([g.flatten() for g in gradients.values()]).norm()
    for name, gradient in trainer.named_gradients():
        assert (gradient.float() - gradients[name]).norm() <= tolerance * (gradients[name].norm() + 0.01 * total), name
    assert trainer.optim_step().grad_norm == pytest.approx(norm, rel=tolerance)
    assert len(trainer.log_probs(packs)) == len(packs)
    trainer.close()


def test_a_pack_beyond_the_host(tmp_path):
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    trainer.plan = dataclasses.replace(trainer.plan, host_limit_bytes=trainer.plan.host_bytes + 1000)
    with pytest.raises(ValueError, match=r"layer inputs .*pack_tokens.*checkpoint_interval.*host_budget_gb"):
        trainer.log_probs(tiny.packs(tiny.sequences()))
    trainer.close()


@pytest.mark.parametrize("budget", [7.0, 8.0, 9.0])
@pytest.mark.parametrize("pack_tokens", [512, 1024, None])
def test_every_admitted_pack_stays_under_the_cap(qwen_7b, budget, pack_tokens):
    """The head's chunk shrinks for a longer pack, down to the least one for the longest."""
    made = plan(qwen_7b, gpu_budget_gb=budget, pack_tokens=pack_tokens)
    for tokens in (1, 512, made.pack_tokens, made.max_pack_tokens):
        assert made.peak(tokens) <= made.gpu_cap_bytes


def test_hidden_states_have_room_for_the_longest_pack(qwen_7b):
    """Their arena is made once: a short pack beside the longest must not count on memory that the arena has."""
    made = plan(qwen_7b)
    assert made.hidden_bytes >= 7 * made.max_pack_tokens * 3584 * 2 + made.resident_bytes
    for tokens in (128, made.max_pack_tokens):
        assert made.peak(tokens) - made.hidden_bytes <= made.reserved_bytes
    assert made.hidden_bytes + made.reserved_bytes < made.gpu_cap_bytes


def test_sweeps_are_cut_by_padded_packs(tmp_path):
    """Compiled layers see padded packs, and so does host memory."""
    trainer = tiny.trainer(tiny.saved(tiny.model(tiny.config()), tmp_path))
    trainer._executor._pack_multiple = 64
    data = tiny.sequences((20, 20, 20, 20))
    packs = pack_sequences(data, max_tokens=20)
    bytes_per_token = LayerSchedule(5, 1, train=True).num_slots * 64 * 4
    room = 4 * 20 * bytes_per_token  # enough for all without padding
    trainer.plan = dataclasses.replace(trainer.plan, host_limit_bytes=trainer.plan.host_bytes + room)
    assert trainer.num_sweeps(packs, train=True) == 4
    trainer.close()


def test_exact_attention_is_not_compiled_by_itself(qwen_7b):
    assert compiles(StreamConfig(), qwen_7b)
    assert not compiles(StreamConfig(attention="sdpa"), qwen_7b)
    assert not compiles(StreamConfig(param_dtype="float32"), qwen_7b)
    assert not compiles(StreamConfig(), decoder_spec(tiny.config()))
    assert compiles(StreamConfig(compile=True), decoder_spec(tiny.config()))


def test_bf16_moments_are_the_advice_when_memory_is_short(qwen_7b):
    with pytest.raises(ValueError, match="optimizer_state_dtype=bfloat16"):
        make_plan(qwen_7b, StreamConfig(host_budget_gb=90), AdamWConfig(), reference=False)
    small = make_plan(
        qwen_7b, StreamConfig(host_budget_gb=90, optimizer_state_dtype="bf16"), AdamWConfig(), reference=False
    )
    assert small.host_bytes == pytest.approx(10 * 7.62e9, rel=0.01)


@pytest.mark.parametrize("reference", ["mmap", "pinned", None])
@pytest.mark.parametrize("train", [True, False])
def test_the_table_adds_up_to_the_plan(qwen_7b, reference, train):
    """The GPU's lines add up to its budget and the host's to what there is, and the table says these numbers."""
    config = StreamConfig(host_budget_gb=170, reference=reference or "mmap", grad_dtype="fp32")
    made = make_plan(qwen_7b, config, AdamWConfig() if train else None, reference=reference is not None)
    device, shared, host = made.device_lines(), made.shared_lines(), made.host_lines()
    assert sum(device.values()) == config.gpu_budget_gb * 1e9
    assert sum(host.values()) == made.host_limit_bytes == 170e9
    assert sum(list(host.values())[:-1]) == made.host_bytes
    assert min(device.values()) >= 0 and min(host.values()) >= 0
    assert sum(shared.values()) == made.costs.ring + made.costs.layer_sum + made.costs.head_weight + made.costs.head_sum
    parameters = qwen_7b.num_parameters
    assert [host[k] for k in ("weights", "residual of the fp32 masters", "AdamW's moments", "gradients")] == [
        2 * parameters, *(n * parameters if train else 0 for n in (2, 8, 4))
    ]  # fmt: skip
    largest = max(b.layout.numel for b in qwen_7b.blocks)
    assert host["reference"] == {"mmap": 4 * largest, "pinned": 2 * parameters, None: 0}[reference]
    assert device["gradient slabs"] == (4 * config.num_grad_slabs * made.slab_numel if train else 0)
    told = [line.split(" GB  ") for line in made.table() if " GB  " in line]
    expected = [*device.items(), *shared.items(), *host.items()]
    assert [(kind, float(size)) for size, kind in told] == [(kind, round(n / 1e9, 2)) for kind, n in expected]
