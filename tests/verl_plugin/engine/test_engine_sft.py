"""MegaTrainEngine on SFT batches against HF, autograd and VERL's own SFT loss."""

import pytest
from verl_cases import Oracle, assert_same_weights, make_engine, rl_rows, sft_batch, supervised_loss, weights

pytestmark = pytest.mark.usefixtures("world")


CUTS = [{}, {"micro_batch_size_per_gpu": 1}, {"use_dynamic_bsz": True, "max_token_len_per_gpu": 20}]


@pytest.mark.parametrize("cut", CUTS)
def test_step_equals_hf_autograd(tiny_model, cut):
    rows = rl_rows(seed=5)
    tokens = sum(int(row["response_mask"].sum()) for row in rows)
    oracle = Oracle(tiny_model)
    loss, norm = oracle.train(sft_batch(rows), supervised_loss(), num_tokens=tokens)
    engine = make_engine(tiny_model)
    with engine.eval_mode():
        validation = engine.infer_batch(sft_batch(rows, **cut), supervised_loss())
    assert sum(validation["loss"]) == pytest.approx(loss, rel=1e-5)
    with engine.train_mode():
        out = engine.train_batch(sft_batch(rows, **cut), supervised_loss())
    assert sum(out["loss"]) == pytest.approx(loss, rel=1e-5)
    # VERL's SFT trainer logs what it gets: numbers only
    assert set(out["metrics"]) == {"grad_norm"}
    assert out["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert_same_weights(weights(engine), oracle.weights(), atol=2e-6)
