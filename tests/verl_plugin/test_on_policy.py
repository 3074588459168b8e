"""When a batch needs no pass for old log-probs, and what the trainer does then in the place of VERL's."""

import inspect
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl_cases import OURS, RUN, composed

from megatrain_rl.verl_plugin import on_policy
from megatrain_rl.verl_plugin.task_runner.trainer import MegaTrainColocateAsync, MegaTrainSync, RunOfOurs

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
ONE = ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", f"{ROLLOUT}.n=4"]


def config(*overrides: str):
    return composed(*RUN, *OURS, *ONE, *overrides)


def test_one_mini_batch_and_one_epoch():
    assert on_policy.one_update(config(), rows=32)


@pytest.mark.parametrize(
    "overrides, rows",
    [
        ([f"{ACTOR}.ppo_mini_batch_size=4"], 32),
        ([f"{ACTOR}.ppo_epochs=2"], 32),
        ([], 64),  # the rows of another sampling, or of answers of several turns
        ([], 16),
        (["algorithm.use_kl_in_reward=true"], 32),
        ([f"{CORRECTION}.bypass_mode=true"], 32),
        ([f"{CORRECTION}.rollout_is=token"], 32),
        ([f"{CORRECTION}.rollout_rs=token_k1"], 32),
    ],
)
def test_where_the_pass_stays(overrides, rows):
    """More than one update, or somebody who reads old log-probs before it."""
    assert not on_policy.one_update(config(*overrides), rows)


def test_an_algorithm_without_a_correction():
    with_none = config()
    OmegaConf.update(with_none, CORRECTION, None, force_add=True)
    assert on_policy.one_update(with_none, rows=32)
    assert not on_policy.wanted(with_none)["correction"]


def test_what_is_asked_for_follows_the_settings():
    given = config(f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", f"{ROLLOUT}.calculate_log_probs=true")
    assert on_policy.wanted(given) == {
        "loss_agg_mode": "seq-mean-token-sum", "loss_scale_factor": None, "gap": True, "correction": True,
    }  # fmt: skip
    without = on_policy.wanted(config(f"{ROLLOUT}.calculate_log_probs=false"))
    assert not without["gap"] and not without["correction"]


def test_metrics_get_verls_names():
    logged = {
        f"actor/{on_policy.PREFIX}actor/entropy": 1.0,
        f"actor/{on_policy.PREFIX}training/x": 2.0,
        "actor/loss": 3,
    }
    on_policy.rename(logged)
    assert logged == {"actor/entropy": 1.0, "training/x": 2.0, "actor/loss": 3}


class Batch(SimpleNamespace):
    def __init__(self, rows: int):
        super().__init__(rows=rows, extra_info={})

    def __len__(self):
        return self.rows


@pytest.fixture
def passes(monkeypatch):
    """VERL's stages with nothing behind them. Here is what the pass and the advantage saw."""
    seen: dict[str, list] = {"pass": [], "correction": [], "asked": []}

    def advantage(self, batch, metrics):
        seen["correction"].append(self.config.algorithm.get("rollout_correction"))
        if metrics.get("fail"):
            raise RuntimeError("no rewards")
        return Batch(len(batch))  # VERL goes on with what the queue gives back, which has no extra information

    def update(self, batch, metrics):
        seen["asked"].append(batch.extra_info.get(on_policy.KEY))
        if seen["asked"][-1]:
            metrics[f"actor/{on_policy.PREFIX}actor/entropy"] = 1.0
        return batch

    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", lambda self, b, metrics: seen["pass"].append(b) or b)
    monkeypatch.setattr(PPOTrainer, "_compute_advantage", advantage)
    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    return seen


def made(cls):
    trainer = object.__new__(cls)
    trainer.config, trainer._of_update = config(), None
    return trainer


def step(trainer, batch) -> dict:
    metrics: dict = {}
    for stage in (trainer._compute_old_log_prob, trainer._compute_advantage, trainer._update_actor):
        batch = stage(batch, metrics)
    return metrics


@pytest.mark.parametrize("cls", [MegaTrainSync, MegaTrainColocateAsync])
def test_the_pass_is_left_out(passes, cls):
    trainer, batch = made(cls), Batch(32)
    given = OmegaConf.to_container(trainer.config.algorithm.rollout_correction)
    assert step(trainer, batch) == {"actor/entropy": 1.0}
    assert passes["pass"] == [] and passes["asked"] == [on_policy.wanted(trainer.config)]
    assert passes["correction"] == [None], "VERL would look for old log-probs there"
    assert OmegaConf.to_container(trainer.config.algorithm.rollout_correction) == given


def test_the_correction_is_put_back_after_an_error(passes):
    trainer, batch = made(MegaTrainSync), Batch(32)
    trainer._compute_old_log_prob(batch, {})
    with pytest.raises(RuntimeError, match="no rewards"):
        trainer._compute_advantage(batch, {"fail": True})
    assert trainer.config.algorithm.rollout_correction.bypass_mode is False


def test_another_batch_of_the_same_run_has_its_pass(passes):
    trainer, batch = made(MegaTrainSync), Batch(64)
    assert step(trainer, Batch(32)) == {"actor/entropy": 1.0} and step(trainer, batch) == {}
    assert passes["pass"] == [batch] and passes["asked"][1] is None and passes["correction"][1] is not None


def test_a_trainer_of_the_users_own_has_its_pass(passes):
    class ByTheMixin(RunOfOurs, PPOTrainerSync):
        pass

    class Further(MegaTrainSync):
        pass

    for cls in (ByTheMixin, Further):
        step(made(cls), Batch(32))
    assert len(passes["pass"]) == 2 and None not in passes["correction"]


def test_who_reads_old_log_probs_in_verls_step():
    """The pass writes them, the advantage's correction and KL read them; the worker sends them to the loss."""
    readers = {
        name
        for name, method in vars(PPOTrainer).items()
        if inspect.isfunction(method) and "old_log_prob" in inspect.getsource(inspect.unwrap(method))
    }
    assert readers == {"_step_once", "_compute_old_log_prob", "_compute_advantage"}
