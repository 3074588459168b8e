"""A batch that gets one update: its own log-probs are the old ones, for every loss that VERL registers.

The truth is VERL's loss with the old log-probs that its pass would have given, which are the model's own.
"""

import pytest
import torch
from test_losses import CUTS, MODES, assert_same_however_cut, loss_of, run
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.utils.debug.metrics import calculate_debug_metrics
from verl_cases import jagged, make_engine, rl_rows, v1_batch

from megatrain_rl.verl_plugin import on_policy

pytestmark = pytest.mark.usefixtures("world")

TEMPERATURE = 0.7
WANTED = {"loss_agg_mode": "token-mean", "loss_scale_factor": None, "gap": True, "correction": True}


@pytest.fixture
def engine(model):
    return make_engine(model)


@pytest.fixture
def rows(oracle):
    """Rows whose old log-probs are the model's own. Row 4 has no counted token."""
    rows = rl_rows(rows=9, seed=3, zero_mask_row=4)
    data = v1_batch(rows, temperature=TEMPERATURE)
    with torch.no_grad():
        output = oracle.model_output(data)
    g = torch.Generator().manual_seed(5)
    for row, log_probs, entropy in zip(rows, output["log_probs"].unbind(), output["entropy"].unbind(), strict=True):
        n = len(row["responses"])
        row["old_log_probs"], row["entropy"] = log_probs[-n - 1 : -1], entropy[-n - 1 : -1]
        row["ref_log_prob"] = log_probs[-n - 1 : -1] + 0.5 * torch.randn(n, generator=g)
        row["rollout_log_probs"] = log_probs[-n - 1 : -1] + 0.1 * torch.randn(n, generator=g)
        row["rollout_is_weights"] = torch.rand(n, generator=g) + 0.5
    return rows


def without_old(rows, *, wanted=WANTED, **settings):
    """The batch of a trainer that left VERL's pass out."""
    kept = [{key: row[key] for key in row if key not in ("old_log_probs", "entropy")} for row in rows]
    data = v1_batch(kept, **settings)
    tu.assign_non_tensor(data, **{on_policy.KEY: wanted})
    return data


def of_update(engine, data, loss_function):
    """The metrics that the engine adds, apart from those of the update."""
    with engine.train_mode():
        found = engine.forward_backward_batch(data, loss_function)["metrics"]
        engine.optimizer_zero_grad()
    prefix = on_policy.PREFIX
    return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}


@pytest.mark.parametrize("mode, entropy", [*((mode, True) for mode in MODES), ("vanilla", False), ("kl_cov", False)])
def test_every_loss_mode(engine, oracle, rows, mode, entropy):
    """With importance weights of the rollout, a KL term and an entropy bonus; VERL's default is without the bonus."""
    loss = loss_of(mode, entropy_coeff=0.05 if entropy else 0.0, use_kl_loss=True, kl_loss_coef=0.3)
    assert_same_however_cut(
        engine, oracle, rows, loss,
        engines_layout=without_old, temperature=TEMPERATURE, calculate_entropy=entropy,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["vanilla", "kl_cov"])
def test_the_ratio_is_one(engine, rows, mode):
    _, _, metrics, _ = run(engine, without_old(rows, temperature=TEMPERATURE), loss_of(mode))
    assert metrics["actor/ppo_kl"] == 0.0


@pytest.mark.parametrize("aggregation, scale", [("token-mean", None), ("seq-mean-token-sum-norm", 50)])
@pytest.mark.parametrize("cut", CUTS)
def test_metrics_are_those_of_verls_pass(engine, rows, cut, aggregation, scale):
    padded = DataProto(
        batch=tu.get_tensordict(
            {
                key: jagged([row[key] for row in rows])
                for key in ("old_log_probs", "rollout_log_probs", "entropy", "response_mask", "responses")
            },
            {},
        ).to_padded_tensor()
    )
    want = {
        "actor/entropy": agg_loss(
            padded.batch["entropy"], padded.batch["response_mask"], aggregation, loss_scale_factor=scale
        ).item()
    }
    want |= calculate_debug_metrics(padded)
    want |= compute_rollout_correction_and_add_to_batch(padded, {})[1]
    wanted = {**WANTED, "loss_agg_mode": aggregation, "loss_scale_factor": scale}
    data = without_old(rows, wanted=wanted, temperature=TEMPERATURE, **CUTS[cut])
    found = of_update(engine, data, loss_of())
    assert want.keys() <= found.keys() and len(want) > 10
    assert {key for key in found.keys() - want.keys() if "gap" not in key} == set()
    for key, value in want.items():
        assert found[key] == [pytest.approx(value, rel=1e-3, abs=1e-5)], key


def test_metrics_without_log_probs_of_the_rollout(engine, rows):
    """rollout.calculate_log_probs=False: there is nothing to compare with."""
    for row in rows:
        del row["rollout_log_probs"]
    data = without_old(rows, wanted={**WANTED, "gap": False, "correction": False}, temperature=TEMPERATURE)
    assert of_update(engine, data, loss_of()).keys() == {"actor/entropy"}


def test_a_batch_that_was_not_asked_for_it_gets_no_such_metrics(engine, rows):
    assert of_update(engine, v1_batch(rows), loss_of()) == {}


def test_gap_is_named_as_the_runs_other_gaps(engine, rows):
    found = of_update(engine, without_old(rows, temperature=TEMPERATURE), loss_of())
    gaps = [(row["rollout_log_probs"] - row["old_log_probs"]).abs()[row["response_mask"].bool()] for row in rows]
    assert found["megatrain/rollout_log_prob_gap_mean"] == [pytest.approx(float(torch.cat(gaps).mean()), rel=1e-3)]
