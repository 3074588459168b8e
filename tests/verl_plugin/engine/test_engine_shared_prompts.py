"""`share_prompts` through VERL's interfaces: the same losses, gradients and results, in both layouts, however cut."""

import pytest
import torch
from test_losses import assert_same_however_cut, loss_of, run
from verl_cases import make_engine, rl_rows, sft_batch, supervised_loss, v0_batch, v1_batch

from megatrain_rl.verl_plugin.engine import batch

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def engine(model):
    return make_engine(model, share_prompts=True)


@pytest.fixture
def rows(oracle):
    """Nine answers to three prompts, in an order that mixes them; old log-probs near the policy."""
    rows = rl_rows(rows=9, seed=3, zero_mask_row=4)
    for i, row in enumerate(rows):
        row["prompts"] = rows[i % 3]["prompts"]
    output = oracle.model_output(v1_batch(rows))["log_probs"].detach().unbind()
    g = torch.Generator().manual_seed(5)
    for row, log_probs in zip(rows, output, strict=True):
        n = len(row["responses"])
        row["old_log_probs"] = log_probs[-n - 1 : -1] + 0.3 * torch.randn(n, generator=g)
    return rows


@pytest.mark.parametrize("layout", [v1_batch, v0_batch])
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "geo_mean", "kl_cov"])
def test_losses(engine, oracle, rows, mode, layout):
    loss = loss_of(mode, entropy_coeff=0.05, use_kl_loss=True, kl_loss_coef=0.3)
    assert_same_however_cut(engine, oracle, rows, loss, layout=layout, temperature=0.7, calculate_entropy=True)


def test_log_probs_come_in_the_rows_order(engine, oracle, rows):
    data = v1_batch(rows, calculate_entropy=True, micro_batch_size_per_gpu=4)
    want = oracle.model_output(data)
    with engine.eval_mode():
        got = engine.infer_batch(data)["model_output"]
    for key in ("log_probs", "entropy"):
        for row, ours, truth in zip(rows, got[key].unbind(), want[key].unbind(), strict=True):
            n = len(row["responses"])
            assert torch.allclose(ours[-n - 1 : -1], truth[-n - 1 : -1].detach(), atol=2e-5)


@pytest.mark.parametrize("layout", [v1_batch, v0_batch])
def test_prompts_are_shared(rows, layout):
    mini_batch = batch.read(layout(rows), predict=batch.everywhere(layout(rows)))
    assert mini_batch.prompt_lengths == [len(row["prompts"]) for row in rows]
    limits = {"max_tokens": 1000, "max_sequences": None}
    (pack,) = mini_batch.packs(**limits, share_prompts=True)
    answers = sum(len(row["responses"]) for row in rows)
    assert pack.num_computed == answers + sum(len(row["prompts"]) for row in rows[:3])
    (pack,) = mini_batch.packs(**limits, share_prompts=False)
    assert pack.source_T is None


def test_sft_has_no_prompts(engine, model):
    """Its packs still take the graph that was compiled for shared ones."""
    rows = rl_rows(rows=5)
    data = sft_batch(rows)
    assert batch.read(data, predict=batch.everywhere(data)).prompt_lengths == [0] * 5
    _, with_setting, _, _ = run(engine, data, supervised_loss())
    _, without, _, _ = run(make_engine(model), data, supervised_loss())
    for name, gradient in without.items():
        assert torch.allclose(with_setting[name], gradient, atol=1e-6), name
