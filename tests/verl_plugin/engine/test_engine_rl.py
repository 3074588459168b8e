"""MegaTrainEngine on RL batches against HF, autograd and VERL's own policy loss: fp32, so tolerances are rounding."""

import pytest
import torch
from verl.workers.utils.padding import response_from_nested
from verl_cases import Oracle, assert_same_weights, make_engine, policy_loss, rl_rows, v0_batch, v1_batch, weights

from megatrain_rl.trainer import StreamTrainer

pytestmark = pytest.mark.usefixtures("world")

AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}


def counted(rows) -> int:
    return sum(int(row["response_mask"].sum()) for row in rows)


def train(engine, data, loss):
    with engine.train_mode():
        return engine.train_batch(data, loss)


def infer(engine, data, loss=None):
    with engine.eval_mode():
        return engine.infer_batch(data, loss)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("layout", [v1_batch, v0_batch])
def test_step_equals_hf_autograd(tiny_model, aggregation, layout):
    """Loss, gradient norm and weights after the step, with KL, entropy, a temperature and several packs."""
    rows = rl_rows()
    settings = {"loss_agg_mode": aggregation, "entropy_coeff": 0.05, **KL}
    extra = {"temperature": 0.7, "calculate_entropy": True}
    oracle = Oracle(tiny_model)
    loss, norm = oracle.train(layout(rows, **extra), policy_loss(**settings), num_tokens=counted(rows))
    engine = make_engine(tiny_model)
    out = train(engine, layout(rows, micro_batch_size_per_gpu=2, **extra), policy_loss(**settings))
    assert len(out["loss"]) == 4
    assert sum(out["loss"]) == pytest.approx(loss, rel=1e-5)
    assert out["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert out["metrics"]["skipped_steps"] == [0.0]
    assert_same_weights(weights(engine), oracle.weights(), atol=2e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_update_does_not_depend_on_how_packs_are_cut(tiny_model, aggregation):
    rows = rl_rows(rows=9, seed=3)
    cuts = [
        {"micro_batch_size_per_gpu": 100},
        {"micro_batch_size_per_gpu": 1},
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 20},
    ]
    results = []
    for cut in cuts:
        engine = make_engine(tiny_model)
        out = train(engine, v1_batch(rows, **cut), policy_loss(loss_agg_mode=aggregation, **KL))
        results.append((len(out["loss"]), sum(out["loss"]), weights(engine)))
    assert [n for n, _, _ in results][:2] == [1, 9] and results[2][0] > 1
    for _, loss, after in results[1:]:
        assert loss == pytest.approx(results[0][1], rel=1e-5)
        assert_same_weights(after, results[0][2], atol=2e-6)


def test_pack_tokens_bounds_verl_limits(tiny_model):
    rows = rl_rows()
    longest = max(len(r["prompts"]) + len(r["responses"]) for r in rows)
    engine = make_engine(tiny_model, pack_tokens=longest)
    for limits in ({"use_dynamic_bsz": True, "max_token_len_per_gpu": 10_000}, {"micro_batch_size_per_gpu": 100}):
        assert len(train(engine, v1_batch(rows, **limits), policy_loss())["loss"]) > 1


@pytest.mark.parametrize("temperature", [0.5, torch.tensor([0.5, 1.0, 2.0, 0.7, 1.3, 0.9, 1.0])])
@pytest.mark.parametrize("layout", [v1_batch, v0_batch])
def test_log_probs_and_entropy_in_row_order(tiny_model, layout, temperature):
    """Every response token's log-prob and entropy, in row order, with exactly the offsets of input_ids."""
    rows = rl_rows()
    data = layout(rows, temperature=temperature, calculate_entropy=True, use_dynamic_bsz=True, max_token_len_per_gpu=25)
    output = infer(make_engine(tiny_model), data)["model_output"]
    with torch.no_grad():
        want = Oracle(tiny_model).model_output(data)
    responses = torch.nested.as_nested_tensor([row["responses"] for row in rows], layout=torch.jagged)
    for key in ("log_probs", "entropy"):
        assert output[key].offsets().equal(data["input_ids"].offsets())
        got, expected = (response_from_nested(x, responses).values() for x in (output[key], want[key]))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_entropy_only_on_request(tiny_model):
    assert set(infer(make_engine(tiny_model), v1_batch(rl_rows()))["model_output"]) == {"log_probs"}


def test_foreign_loss_reads_every_position(tiny_model):
    """Only VERL's own losses are known to read response positions only."""

    def mean_of_everything(model_output, data, dp_group=None):
        return model_output["log_probs"].values().sum() / data["batch_num_tokens"], {}

    rows = rl_rows()
    data = v1_batch(rows)
    with torch.no_grad():
        total = Oracle(tiny_model).model_output(data)["log_probs"].values().sum()
    loss = infer(make_engine(tiny_model), data, mean_of_everything)["loss"]
    assert sum(loss) == pytest.approx(float(total) / counted(rows), rel=1e-5)


def test_row_with_no_counted_token_and_nan_at_masked_positions(tiny_model):
    """A synthetic padding row alone in its pack, and NaN wherever the mask is 0: the update is that of clean rows."""
    clean = rl_rows(zero_mask_row=2)
    dirty = rl_rows(zero_mask_row=2)
    for row in dirty:
        masked = row["response_mask"] == 0
        for key in ("old_log_probs", "ref_log_prob", "advantages"):
            row[key][masked] = float("nan")
    oracle = Oracle(tiny_model)
    oracle.train(v1_batch(clean), policy_loss(**KL), num_tokens=counted(clean))
    for layout in (v1_batch, v0_batch):
        engine = make_engine(tiny_model)
        out = train(engine, layout(dirty, micro_batch_size_per_gpu=1), policy_loss(**KL))
        assert out["metrics"]["skipped_steps"] == [0.0]
        assert_same_weights(weights(engine), oracle.weights(), atol=2e-6)


def test_mini_batch_with_no_counted_token_has_loss_zero(tiny_model):
    rows = rl_rows(rows=1, zero_mask_row=0)
    out = train(make_engine(tiny_model), v1_batch(rows), policy_loss())
    assert out["loss"] == [0.0] and out["metrics"]["grad_norm"] == 0.0


def test_non_finite_step_is_skipped_and_counted(tiny_model):
    rows = rl_rows()
    rows[1]["advantages"][0] = float("inf")
    engine = make_engine(tiny_model)
    before = weights(engine)
    assert train(engine, v1_batch(rows), policy_loss())["metrics"]["skipped_steps"] == [1.0]
    assert_same_weights(weights(engine), before, atol=0)
    out = train(engine, v1_batch(rl_rows()), policy_loss())
    assert out["metrics"]["skipped_steps"] == [1.0]
    assert any(not torch.equal(weights(engine)[name], before[name]) for name in before)


def test_training_returns_model_output_only_on_request(tiny_model):
    engine = make_engine(tiny_model)
    assert train(engine, v1_batch(rl_rows()), policy_loss())["model_output"] == {}
    output = train(engine, v1_batch(rl_rows(), return_model_output=True), policy_loss())["model_output"]
    assert set(output) == {"log_probs"}


def test_a_row_without_a_prompt_is_refused(tiny_model):
    """Its first response token would be predicted from nothing."""
    rows = rl_rows()
    rows[2]["prompts"] = rows[2]["prompts"][:0]
    with pytest.raises(ValueError, match=r"no prompt.*data\.prompt_key"):
        make_engine(tiny_model).infer_batch(v1_batch(rows))


def test_padded_input_ids_and_groups_are_refused(tiny_model):
    engine = make_engine(tiny_model)
    data = v1_batch(rl_rows())
    data["input_ids"] = torch.nested.to_padded_tensor(data["input_ids"], 0)
    with pytest.raises(ValueError, match=r"data\.pad_mode=no_padding"):
        infer(engine, data)
    with pytest.raises(ValueError, match="force_group_size"):
        infer(engine, v1_batch(rl_rows(), force_group_size=2))


class Waits:
    """Stands in for the clock of the trainer's waits: whoever reads weights after an update waits for it, one second.

    How the trainer itself measures: tests/test_optimizer_wait.py.
    """

    def __init__(self):
        self.seconds = 0.0
        self._update_runs = False

    def begin(self) -> None:
        self._update_runs = True

    def read(self) -> None:
        self.seconds += self._update_runs
        self._update_runs = False


@pytest.fixture
def waits(monkeypatch) -> Waits:
    waits = Waits()
    step, sync = StreamTrainer.optim_step, StreamTrainer.named_parameters
    forward_backward, save = StreamTrainer.forward_backward, StreamTrainer.save_checkpoint

    def optim_step(self):
        result = step(self)
        waits.begin()
        return result

    def named_parameters(self):
        waits.read()
        yield from sync(self)

    def reading(method):
        return lambda *args, **kwargs: (waits.read(), method(*args, **kwargs))[1]

    monkeypatch.setattr(StreamTrainer, "optim_step", optim_step)
    monkeypatch.setattr(StreamTrainer, "named_parameters", named_parameters)
    monkeypatch.setattr(StreamTrainer, "forward_backward", reading(forward_backward))
    monkeypatch.setattr(StreamTrainer, "save_checkpoint", reading(save))
    monkeypatch.setattr(StreamTrainer, "optimizer_wait_s", property(lambda self: waits.seconds))
    return waits


def test_wait_for_the_optimizer_is_reported_since_the_start(tiny_model, waits):
    """Each update waits for the one before. VERL logs a step's last figure, so figures of steps can be subtracted."""
    from verl.trainer.ppo.v1.utils import MetricsAggregator
    from verl.utils.metric import reduce_metrics

    engine = make_engine(tiny_model)
    reported = []
    for seed in range(3):
        metrics = train(engine, v1_batch(rl_rows(seed=seed)), policy_loss())["metrics"]
        reported += metrics["optimizer_wait_s/max"]
    assert reported == [0.0, 1.0, 2.0]
    name = "actor/optimizer_wait_s/max"
    logged = reduce_metrics({name: reported})
    aggregator = MetricsAggregator()
    aggregator.add_step_metrics(logged, sample_count=4)
    assert aggregator.get_aggregated_metrics()[name] == logged[name] == reported[-1]


def test_what_a_weight_sync_waits_for_the_optimizer_is_told_apart(tiny_model, tmp_path, waits):
    """A weight sync, a checkpoint and the next update wait equally long; only the first is reported as the sync's."""
    engine = make_engine(tiny_model)

    def update() -> tuple[float, float]:
        metrics = train(engine, v1_batch(rl_rows()), policy_loss())["metrics"]
        [synced], [waited] = metrics["weight_sync_wait_s/max"], metrics["optimizer_wait_s/max"]
        return synced, waited

    assert update() == (0, 0)
    weights, _ = engine.get_per_tensor_param()
    assert len(list(weights)) > 0
    assert update() == (1, 1)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    weights, _ = engine.get_per_tensor_param()
    assert len(list(weights)) > 0
    assert update() == (1, 2), "the checkpoint waited, not the sync"
    assert update() == (1, 3), "the update waited"
