"""Every loss that VERL registers, cut three ways: gradient, loss and metrics are those of one micro-batch.

The truth is VERL's own loss on a resident model with autograd, called once with the whole mini-batch. What there is to
try is read from VERL, so that a member of a later version is tried too, or fails here for want of a case.
"""

import ast
import functools
import inspect
import textwrap
from pathlib import Path

import pytest
import torch
import verl
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils.metric import Metric
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl_cases import Oracle, make_engine, policy_loss, rl_rows, v0_batch, v1_batch

from megatrain_rl.verl_plugin.engine import separable
from megatrain_rl.verl_plugin.on_policy import PREFIX

pytestmark = pytest.mark.usefixtures("world")

ROWS = 9
CUTS = {
    "one pack": {"micro_batch_size_per_gpu": 100},
    "some packs": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 40},
    "a pack a row": {"micro_batch_size_per_gpu": 1},
}


def compared_with(function, name: str) -> set[str]:
    """The strings that `function` compares its argument `name` with."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == name:
            found |= {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return found


MODES = sorted(core_algos.POLICY_LOSS_REGISTRY)
AGGREGATIONS = sorted(compared_with(core_algos.agg_loss, "loss_agg_mode"))
# "full" wants the logits of the whole vocabulary, which no trainer of VERL's hands over
KL_TYPES = sorted(compared_with(core_algos.kl_penalty_forward, "kl_penalty") - {"full"})
WEIGHTS = sorted(compared_with(rollout_corr_helper.compute_rollout_correction_weights, "rollout_is"))
REJECTIONS = sorted(rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS)

# Large enough that a mini-batch of some fifty tokens has tokens to pick, and bounds that some cross and some do not.
PICKING = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 100.0, "kl_cov_ratio": 0.2, "dro_beta": 0.1}


def loss_of(mode: str = "vanilla", *, correction: dict | None = None, **settings):
    chosen = PolicyLossConfig(
        loss_mode=mode, **PICKING, rollout_correction=RolloutCorrectionConfig(**(correction or {}))
    )
    return policy_loss(policy_loss=chosen, **settings)


@pytest.fixture
def engine(model):
    return make_engine(model)


@pytest.fixture
def rows(model):
    """Rows near the policy, as after a few mini-batches of a step: most tokens within the clip range, some outside.

    Row 4 has no counted token. Row 0's advantages are all negative.
    """
    rows = rl_rows(rows=ROWS, seed=3, zero_mask_row=4)
    output = Oracle(model).model_output(v1_batch(rows))["log_probs"].detach().unbind()
    g = torch.Generator().manual_seed(5)
    for row, log_probs in zip(rows, output, strict=True):
        n = len(row["responses"])
        row["old_log_probs"] = log_probs[-n - 1 : -1] + 0.3 * torch.randn(n, generator=g)
        row["ref_log_prob"] = log_probs[-n - 1 : -1] + 0.5 * torch.randn(n, generator=g)
        row["rollout_is_weights"] = torch.rand(n, generator=g) + 0.5
    rows[0]["advantages"] = -rows[0]["advantages"].abs()
    return rows


def measured(metrics) -> dict[str, float]:
    """The values that VERL logs of one mini-batch."""
    from verl.utils.metric import reduce_metrics

    found = {key: value for key, value in metrics.items() if key != "grad_norm" and not key.startswith(PREFIX)}
    return {key: float(value) for key, value in reduce_metrics(found).items()}


def truth(oracle, data, loss_function):
    """Loss, gradients and metrics of one call with everything."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.py_functional import append_to_dict

    data = data.copy()
    tu.assign_non_tensor(data, batch_num_tokens=int(data["loss_mask"].sum()), dp_size=1, sp_size=1)
    output = oracle.model_output(data)
    if not data["calculate_entropy"]:
        del output["entropy"]
    torch.manual_seed(0)
    loss, metrics = loss_function(model_output=output, data=data, dp_group=None)
    oracle.model.zero_grad()
    loss.backward()
    merged: dict = {}
    append_to_dict(merged, metrics)
    return float(loss), {n: p.grad.clone() for n, p in oracle.model.named_parameters()}, measured(merged)


def run(engine, data, loss_function):
    """Loss, gradients, metrics and number of packs of the engine's own path."""
    torch.manual_seed(0)
    with engine.train_mode():
        out = engine.forward_backward_batch(data, loss_function)
        gradients = {name: grad.float().clone() for name, grad in engine.trainer.named_gradients()}
        engine.optimizer_zero_grad()
    return sum(out["loss"]), gradients, measured(out["metrics"]), len(out["loss"])


def assert_same_however_cut(engine, oracle, rows, loss_function, *, layout=v1_batch, engines_layout=None, **extra):
    """engines_layout: makes the engine's batch, where that differs from the truth's."""
    want_loss, want, want_metrics = truth(oracle, layout(rows, **extra), loss_function)
    engines_layout = engines_layout or layout
    assert max(grad.abs().max() for grad in want.values()) > 1e-4, "a loss without a gradient shows nothing"
    packs = []
    for name, cut in CUTS.items():
        loss, gradients, metrics, num_packs = run(engine, engines_layout(rows, **{**extra, **cut}), loss_function)
        packs.append(num_packs)
        assert loss == pytest.approx(want_loss, rel=1e-4, abs=1e-6), name
        scale = max(float(grad.abs().max()) for grad in want.values())
        for parameter, grad in want.items():
            difference = float((gradients[parameter] - grad).abs().max())
            assert difference < 1e-4 * scale, (name, parameter, difference / scale)
        assert metrics.keys() == want_metrics.keys(), name
        for key, value in want_metrics.items():
            assert metrics[key] == pytest.approx(value, rel=1e-3, abs=1e-5), (name, key)
    assert packs[0] == 1 and 1 < packs[1] < ROWS and packs[2] == ROWS


@pytest.mark.parametrize("mode", MODES)
def test_every_loss_mode(engine, oracle, rows, mode):
    """With importance weights of the rollout, a KL term and an entropy bonus."""
    loss = loss_of(mode, entropy_coeff=0.05, use_kl_loss=True, kl_loss_coef=0.3)
    assert_same_however_cut(engine, oracle, rows, loss, temperature=0.7, calculate_entropy=True)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "kl_cov"])
def test_every_aggregation(engine, oracle, rows, mode, aggregation):
    assert_same_however_cut(engine, oracle, rows, loss_of(mode, loss_agg_mode=aggregation))


def test_a_scale_factor(engine, oracle, rows):
    loss = loss_of(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=50)
    assert_same_however_cut(engine, oracle, rows, loss)


@pytest.mark.parametrize("suffix", ["", "+"])
@pytest.mark.parametrize("kind", KL_TYPES)
def test_every_kl_loss(engine, oracle, rows, kind, suffix):
    loss = loss_of(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type=kind + suffix)
    assert_same_however_cut(engine, oracle, rows, loss)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("weights", [None, *WEIGHTS])
@pytest.mark.parametrize("loss_type", sorted(compared_with(core_algos.compute_policy_loss_bypass_mode, "loss_type")))
def test_every_bypass_mode(engine, oracle, rows, loss_type, weights, normalised):
    correction = {
        "bypass_mode": True,
        "loss_type": loss_type,
        "rollout_is": weights,
        "rollout_is_threshold": 1.2,
        "rollout_is_batch_normalize": normalised,
    }
    assert_same_however_cut(engine, oracle, rows, loss_of("bypass_mode", correction=correction))


@pytest.mark.parametrize("rejection", REJECTIONS)
def test_every_rejection_in_bypass_mode(engine, oracle, rows, rejection):
    threshold = "0.8_1.25" if rejection.endswith("k1") else 0.05
    correction = {
        "bypass_mode": True,
        "loss_type": "reinforce",
        "rollout_rs": rejection,
        "rollout_rs_threshold": threshold,
    }
    assert_same_however_cut(engine, oracle, rows, loss_of("bypass_mode", correction=correction))


@pytest.mark.parametrize("mode", ["vanilla", "clip_cov", "geo_mean"])
def test_padded_layout(engine, oracle, rows, mode):
    assert_same_however_cut(engine, oracle, rows, loss_of(mode), layout=v0_batch)


@pytest.mark.parametrize("mode", MODES)
def test_mini_batch_with_no_counted_token(engine, mode):
    rows = rl_rows(rows=2, zero_mask_row=0)
    rows[1]["response_mask"].zero_()
    loss, gradients, _, _ = run(engine, v1_batch(rows, micro_batch_size_per_gpu=1), loss_of(mode))
    assert loss == 0.0 and all(not grad.any() for grad in gradients.values())


def test_a_mode_of_the_users_own(engine, oracle, rows, monkeypatch):
    """It may look at whatever it is handed: here it divides by the tokens of the call. Also under a name of VERL's.

    A decorator may have copied the names of VERL's function to it.
    """

    def mine(old_log_prob, log_prob, advantages, response_mask, **_):
        ratio = torch.exp(log_prob - old_log_prob)
        return -(ratio * advantages * response_mask).sum() / response_mask.sum(), {"mine/tokens": response_mask.sum()}

    disguised = functools.wraps(core_algos.compute_policy_loss_vanilla)(lambda **given: mine(**given))
    for name, function in (("mine", mine), ("vanilla", mine), ("vanilla", disguised)):
        monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, name, function)
        assert_same_however_cut(engine, oracle, rows, loss_of(name))


def rebound(loss_function):
    """A partial of a wrapped partial, as another library may make of VERL's loss."""

    @functools.wraps(ppo_loss)
    def wrapped(*args, **kwargs):
        return ppo_loss(*args, **kwargs)

    return functools.partial(functools.partial(wrapped), **loss_function.keywords)


class Bound:
    def __init__(self, loss_function):
        self.config = loss_function.keywords["config"]

    def loss(self, model_output, data, dp_group=None):
        return ppo_loss(self.config, model_output, data, dp_group)


FORMS = {
    "partial of a wrapper": rebound,
    "bound method": lambda loss: Bound(loss).loss,
    "lambda": lambda loss: lambda **kwargs: loss(**kwargs),
    "config as an argument": lambda loss: functools.partial(ppo_loss, loss.keywords["config"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_verl_loss_in_another_form(engine, oracle, rows, form):
    """Its aggregation by the width of the responses depends on what it is handed."""
    loss = FORMS[form](loss_of(loss_agg_mode="seq-mean-token-sum-norm"))
    assert_same_however_cut(engine, oracle, rows, loss)


def test_a_loss_of_a_whole_mini_batch_that_is_not_finite_skips_the_step(engine, rows):
    rows[1]["advantages"][0] = float("inf")
    before = {name: tensor.clone() for name, tensor in engine.trainer.named_parameters()}
    with engine.train_mode():
        out = engine.train_batch(v1_batch(rows, micro_batch_size_per_gpu=2), loss_of("geo_mean"))
    assert out["metrics"]["skipped_steps"] == [1.0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.trainer.named_parameters())


def test_losses_that_add_up_take_one_forward(engine, rows, monkeypatch):
    """Only the others need log-probs before the packs' turn."""
    forwards = []
    log_probs = engine.trainer.log_probs
    monkeypatch.setattr(engine.trainer, "log_probs", lambda *a, **k: forwards.append(1) or log_probs(*a, **k))
    separate = {}
    for mode in MODES:
        forwards.clear()
        run(engine, v1_batch(rows), loss_of(mode))
        separate[mode] = not forwards
    assert {mode for mode, alone in separate.items() if not alone} == {"clip_cov", "kl_cov", "geo_mean"}


def test_what_is_listed_is_registered():
    """A loss mode that VERL drops or renames leaves the list."""
    assert set(MODES) >= separable._SEPARABLE_MODES


def test_validation_loss_is_that_of_the_whole_mini_batch(engine, oracle, rows):
    data = v1_batch(rows, micro_batch_size_per_gpu=1)
    want, _, want_metrics = truth(oracle, data, loss_of("geo_mean"))
    with engine.eval_mode():
        out = engine.infer_batch(data, loss_of("geo_mean"))
    assert sum(out["loss"]) == pytest.approx(want, rel=1e-4)
    assert measured(out["metrics"])["actor/ppo_kl"] == pytest.approx(want_metrics["actor/ppo_kl"], rel=1e-4)
    assert isinstance(out["metrics"]["actor/ppo_kl"], Metric)


def test_advantages_and_decoupled_corrections_are_computed_in_the_driver():
    """No file of VERL's workers names them, so they see whole batches and no pack."""
    names = ["compute_advantage", "get_adv_estimator_fn", "compute_rollout_correction_and_add_to_batch"]
    names += [function.__name__ for function in core_algos.ADV_ESTIMATOR_REGISTRY.values()]
    assert len(names) > 10
    workers = Path(verl.__file__).parent / "workers"
    text = {file: file.read_text() for file in workers.rglob("*.py")}
    assert len(text) > 20
    assert [(file.name, name) for file, words in text.items() for name in names if name in words] == []
