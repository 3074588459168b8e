"""The engine around its steps: modes, mini-batches and epochs, the reference, checkpoints, weights."""

import dataclasses

import pytest
import torch
from verl_cases import (
    assert_same_weights,
    make_engine,
    optimizer_config,
    policy_loss,
    rl_rows,
    save_tiny_model,
    v1_batch,
    weights,
)

from megatrain_rl.verl_plugin.engine import checkpoint
from megatrain_rl.verl_plugin.engine.weight_sync import stream_weights

pytestmark = pytest.mark.usefixtures("world")


def train(engine, seed):
    with engine.train_mode():
        engine.train_batch(v1_batch(rl_rows(seed=seed)), policy_loss())
        engine.lr_scheduler_step()


def log_probs(engine):
    with engine.eval_mode():
        return engine.infer_batch(v1_batch(rl_rows()))["model_output"]["log_probs"].values()


def with_reference(model, **knobs):
    from megatrain_rl.verl_plugin.config import REFERENCE_MARKER

    return make_engine(
        model, model_settings={"lora_adapter_path": REFERENCE_MARKER}, reference_for_kl_loss=True, **knobs
    )


def test_modes_nest(tiny_model):
    engine = make_engine(tiny_model)
    with engine.train_mode():
        with engine.train_mode(disable_auto_offload=True):
            assert engine.mode == "train"
        assert engine.mode == "train"
        with engine.eval_mode():
            assert engine.mode == "eval"
        assert engine.mode == "train"
    assert engine.mode is None


def test_worker_runs_mini_batches_and_epochs(tiny_model):
    """VERL's own TrainingWorker: 4 mini-batches (2 per epoch) are 4 optimizer steps and one scheduler step."""
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    from megatrain_rl.verl_plugin.config import engine_config

    worker = TrainingWorker(
        config=TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=tiny_model),
            engine_config=engine_config(param_dtype="float32", optimizer="torch"),
            optimizer_config=optimizer_config(lr_warmup_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    worker.set_loss_fn(policy_loss(use_kl_loss=True))
    data = v1_batch(rl_rows(rows=8), mini_batch_size=4, epochs=2, seed=1, dataloader_kwargs={"shuffle": False})
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    assert len(metrics["grad_norm"]) == 4 and all(norm > 0 for norm in metrics["grad_norm"])
    assert metrics["skipped_steps"] == [0.0] * 4
    assert [lr for lr in metrics["lr"] if lr is not None] == [pytest.approx(1e-3)]
    output = worker.infer_batch(v1_batch(rl_rows(rows=8), compute_loss=False, global_token_num=[10] * 8))
    assert output["log_probs"].is_nested


def test_reference_is_frozen_and_exact(tiny_model):
    engine = with_reference(tiny_model)
    before = log_probs(engine)
    for seed in range(3):
        train(engine, seed)
    with engine.disable_adapter():
        reference = log_probs(engine)
    torch.testing.assert_close(reference, before, rtol=0, atol=0)
    assert (log_probs(engine) - before).abs().max() > 1e-3


def test_reference_survives_resume(tiny_model, tmp_path):
    engine = with_reference(tiny_model)
    before = log_probs(engine)
    train(engine, 0)
    engine.save_checkpoint(str(tmp_path / "global_step_1" / "actor"), None, 1, None)
    resumed = with_reference(tiny_model)
    resumed.load_checkpoint(str(tmp_path / "global_step_1" / "actor"), None, False)
    torch.testing.assert_close(log_probs(resumed), log_probs(engine), rtol=0, atol=0)
    with resumed.disable_adapter():
        torch.testing.assert_close(log_probs(resumed), before, rtol=0, atol=0)


def test_no_reference_without_a_kl_term(tiny_model):
    engine = make_engine(tiny_model)
    with pytest.raises(ValueError, match="use_kl_loss=true"), engine.disable_adapter():
        pass


def test_forward_only_engine(tiny_model):
    """The separate reference: no optimizer, same log-probs."""
    engine = make_engine(tiny_model, forward_only=True)
    torch.testing.assert_close(log_probs(engine), log_probs(make_engine(tiny_model)), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_resume_equals_uninterrupted(tiny_model, tmp_path, kind):
    optim = {"lr_scheduler_type": kind, "lr_warmup_steps": 2, "total_training_steps": 6}
    engine = make_engine(tiny_model, optim=optimizer_config(**optim))
    train(engine, 0)
    train(engine, 1)
    path = str(tmp_path / "global_step_2")
    engine.save_checkpoint(local_path=path, global_step=2, max_ckpt_to_keep=None)
    train(engine, 2)
    resumed = make_engine(tiny_model, optim=optimizer_config(**optim))
    resumed.load_checkpoint(path)
    train(resumed, 2)
    assert_same_weights(weights(resumed), weights(engine), atol=0)
    assert resumed.lr_scheduler_step() == engine.lr_scheduler_step()


def test_checkpoint_is_a_hf_model(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = make_engine(tiny_model)
    train(engine, 0)
    engine.save_checkpoint(local_path=str(tmp_path / "global_step_1"), global_step=1)
    folder = tmp_path / "global_step_1" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_same_weights(weights(engine), {n: p.detach() for n, p in model.named_parameters()}, atol=0)
    assert len(AutoTokenizer.from_pretrained(folder)) > 0


def test_a_checkpoint_has_the_tokenizer_and_template_that_were_used(tiny_model, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    other = save_tiny_model(str(tmp_path / "other"))
    used = AutoTokenizer.from_pretrained(other)
    used.add_tokens(["<think>"])
    used.save_pretrained(other)
    engine = make_engine(tiny_model, model_settings={"tokenizer_path": other, "custom_chat_template": template})
    engine.save_checkpoint(local_path=str(tmp_path / "global_step_1"), global_step=1)
    saved = AutoTokenizer.from_pretrained(tmp_path / "global_step_1" / "huggingface")
    assert saved.apply_chat_template([{"role": "user", "content": "one"}], tokenize=False) == "<user>one"
    assert saved("<think>").input_ids == used("<think>").input_ids and len(saved("<think>").input_ids) == 1
    assert GenerationConfig.from_pretrained(tmp_path / "global_step_1" / "huggingface")


def test_missing_checkpoint_is_one_clear_error(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"global_step_7.*trainer\.resume_mode"):
        make_engine(tiny_model).load_checkpoint(str(tmp_path / "global_step_7"))


def whole(folder) -> None:
    """A folder that looks like a checkpoint of ours."""
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"format": 2}')


def begun(folder) -> None:
    """A folder as a crash leaves it."""
    folder.mkdir(parents=True)
    (folder / ".megatrain_checkpoint").touch()


def steps_left(root, role) -> list[int]:
    return sorted(
        int(path.name.split("_")[-1]) for path in root.iterdir() if (path / role / "trainer_state.json").is_file()
    )


@pytest.mark.parametrize("role", ["", "actor"])
def test_the_disk_holds_one_checkpoint_more_than_is_kept(tmp_path, role):
    """Before a save all but the last `keep` and the one to resume from go; what is no checkpoint does not count."""
    for step in (1, 2, 3):
        whole(tmp_path / f"global_step_{step}" / role)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("3")
    (tmp_path / "global_step_4" / role).mkdir(parents=True)
    begun(tmp_path / "global_step_2" / "actor.tmp" if role else tmp_path / "global_step_2.tmp")
    begun(tmp_path / "global_step_0" / role)
    checkpoint.make_room(str(tmp_path / "global_step_5" / role), keep=1)
    assert steps_left(tmp_path, role) == [3]
    assert (
        not list(tmp_path.rglob("*.tmp")) and not (tmp_path / "global_step_0" / role / ".megatrain_checkpoint").exists()
    )
    whole(tmp_path / "global_step_5" / role)
    checkpoint.remove_oldest(str(tmp_path / "global_step_5" / role), keep=1)
    assert steps_left(tmp_path, role) == [3, 5], "VERL still resumes from 3"
    tracker.write_text("5")
    checkpoint.make_room(str(tmp_path / "global_step_6" / role), keep=1)
    assert steps_left(tmp_path, role) == [5]


@pytest.mark.parametrize("role", ["", "actor"])
def test_saving_a_step_again_removes_only_what_is_too_much(tmp_path, role):
    for step in (1, 2, 3):
        whole(tmp_path / f"global_step_{step}" / role)
    checkpoint.make_room(str(tmp_path / "global_step_3" / role), keep=1)
    assert steps_left(tmp_path, role) == [2, 3]
    checkpoint.make_room(str(tmp_path / "global_step_3" / role), keep=None)
    assert steps_left(tmp_path, role) == [2, 3]


@pytest.mark.parametrize("role", ["", "actor"])
def test_pruning_leaves_foreign_folders(tmp_path, role):
    for step in (1, 2, 3):
        (tmp_path / f"global_step_{step}" / role).mkdir(parents=True)
        (tmp_path / f"global_step_{step}" / role / "thesis.tex").write_text("text")
    whole(tmp_path / "global_step_4" / role)
    checkpoint.make_room(str(tmp_path / "global_step_5" / role), keep=1)
    checkpoint.remove_oldest(str(tmp_path / "global_step_4" / role), keep=1)
    assert len(list(tmp_path.rglob("thesis.tex"))) == 3 and steps_left(tmp_path, role) == [4]


@pytest.mark.parametrize("role", ["", "actor"])
def test_pruning_leaves_what_others_put_into_a_checkpoint(tiny_model, tmp_path, role):
    """But not the state of VERL's data loader, which it puts beside a checkpoint of an SFT run."""
    engine = make_engine(tiny_model)
    for step in (1, 2, 3):
        place = tmp_path / f"global_step_{step}" / role
        engine.save_checkpoint(local_path=str(place), global_step=step)
        if not role:
            (place / "data_0.pt").write_text("position")
    card = tmp_path / "global_step_1" / role / "huggingface" / "README.md"
    card.write_text("card")
    newest = str(tmp_path / "global_step_3" / role)
    assert len(checkpoint.remove_oldest(newest, keep=1)) == 2
    assert checkpoint.remove_oldest(newest, keep=1) == [], "nothing of ours is left"
    assert card.read_text() == "card" and not (tmp_path / "global_step_1" / role / "data_0.pt").exists()
    assert not (tmp_path / "global_step_2" / role).exists() and steps_left(tmp_path, role) == [3]
    engine.save_checkpoint(local_path=str(tmp_path / "global_step_1" / role), global_step=1)
    assert steps_left(tmp_path, role) == [1, 3]


@pytest.mark.parametrize("role", ["", "actor"])
def test_what_a_crash_left_beside_its_place_can_be_resumed(tiny_model, tmp_path, role):
    engine = make_engine(tiny_model)
    train(engine, 0)
    place = tmp_path / "global_step_1" / role
    engine.save_checkpoint(local_path=str(place), global_step=1)
    place.rename(place.with_name(place.name + ".old"))
    resumed = make_engine(tiny_model)
    resumed.load_checkpoint(str(place))
    assert_same_weights(weights(resumed), weights(engine), atol=0)


@pytest.mark.parametrize("role", ["", "actor"])
def test_oldest_checkpoints_go_by_number(tmp_path, role):
    for step in (2, 9, 10, 30):
        whole(tmp_path / f"global_step_{step}" / role)
    checkpoint.remove_oldest(str(tmp_path / "global_step_10" / role), keep=2)
    left = sorted(path.name for path in tmp_path.iterdir() if (path / role / "trainer_state.json").is_file())
    assert left == ["global_step_10", "global_step_30", "global_step_9"]
    assert checkpoint.remove_oldest(str(tmp_path / "global_step_10" / role), keep=None) == []


def test_weight_sync_sends_hf_names_once(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    want = {name: p.detach() for name, p in model.named_parameters()}
    engine = make_engine(tiny_model)
    assert_same_weights(weights(engine), want, atol=0)
    names = [name for name, _ in stream_weights(engine.trainer, device="cpu", bucket_bytes=1)]
    assert len(names) == len(set(names)) == len(want)


def test_threads_are_set_on_purpose(tiny_model):
    before = torch.get_num_threads()
    try:
        make_engine(tiny_model, cpu_threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_pruning_keeps_what_verl_would_resume_from(tmp_path):
    """VERL's tracker names step 9 until step 10 is complete: without 9, a crash now would leave nothing to resume."""
    for step in (8, 9, 10):
        whole(tmp_path / f"global_step_{step}" / "actor")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    checkpoint.remove_oldest(str(tmp_path / "global_step_10" / "actor"), keep=1)
    assert [(tmp_path / f"global_step_{step}" / "actor").is_dir() for step in (8, 9, 10)] == [False, True, True]


@pytest.mark.parametrize("role", ["", "actor"])
def test_pruning_touches_no_other_names_and_no_links(tmp_path, role):
    elsewhere = tmp_path / "other_run" / "global_step_1"
    whole(elsewhere / role)
    root = tmp_path / "run"
    for name in ("best_global_step_1", "global_step_2", "global_step_3"):
        whole(root / name / role)
    (root / "global_step_1").symlink_to(elsewhere)
    checkpoint.remove_oldest(str(root / "global_step_3" / role), keep=1)
    assert (elsewhere / role / "trainer_state.json").is_file() and (root / "best_global_step_1" / role).is_dir()
    assert not (root / "global_step_2" / "actor").exists() and (root / "global_step_3" / role).is_dir()


def test_budget_must_hold_the_weight_transfer_too(tiny_model, monkeypatch):
    """The bucket of VERL's weight transfer is allocated inside the budget."""
    engine = make_engine(tiny_model, sync_bucket_megabytes=2048)
    trainer = engine.trainer
    monkeypatch.setattr("megatrain_rl.verl_plugin.engine.engine.get_device_name", lambda: "cuda")
    engine._check_bucket_fits(trainer)
    cap = trainer.plan.idle_bytes + (1 << 30)
    monkeypatch.setattr(trainer, "plan", dataclasses.replace(trainer.plan, gpu_cap_bytes=cap))
    with pytest.raises(ValueError, match=r"gpu_budget_gb=.* 1\.1 .*update_weights_bucket_megabytes"):
        engine._check_bucket_fits(trainer)


def test_steps_of_verls_tinker_worker(tiny_model):
    """It sets the learning rate of a step by way of an optimizer's groups; other settings are refused."""
    from verl.workers.engine_workers_tinker import _apply_optim_step_params

    engine = make_engine(tiny_model, optim=optimizer_config(lr=1e-3))
    _apply_optim_step_params(engine.optimizer, None)
    _apply_optim_step_params(engine.optimizer, {"lr": 5e-4})
    assert engine.trainer.lr == 5e-4 and engine.optimizer.param_groups[0]["lr"] == 5e-4
    before = weights(engine)
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(v1_batch(rl_rows()), policy_loss())
    assert engine.optimizer_step() > 0
    moved = max((now - before[name]).abs().max() for name, now in weights(engine).items())
    assert 4e-4 < moved < 6e-4, "the first step of Adam is the learning rate"
    with pytest.raises(ValueError, match="betas"):
        _apply_optim_step_params(engine.optimizer, {"betas": (0.9, 0.9)})
    with pytest.raises(ValueError, match=r"optim\.betas"):
        engine.optimizer.param_groups[0].update({"betas": (0.9, 0.9)})


def test_an_engine_without_a_checkpoint_config(tiny_model):
    from verl.workers.config import HFModelConfig
    from verl.workers.engine import EngineRegistry

    from megatrain_rl.verl_plugin.config import engine_config

    model = HFModelConfig(path=tiny_model)
    for given in ({}, {"checkpoint_config": None}):
        EngineRegistry.new(
            model_type="language_model", backend="megatrain", model_config=model, engine_config=engine_config(),
            optimizer_config=optimizer_config(), **given,
        )  # fmt: skip
