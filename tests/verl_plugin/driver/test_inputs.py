"""Data, loggers, context and disk of a run are checked before Ray starts, and the setting to change is named."""

import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
import verl_cases
from verl.utils.config import validate_config

from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.verl_plugin.driver import inputs

ROLLOUT = "actor_rollout_ref.rollout"
Usage = namedtuple("Usage", "total used free")


def composed(*overrides: str):
    base = [*verl_cases.OURS, *verl_cases.RUN, "trainer.device=cpu"]
    base += ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "trainer.logger=[console]"]
    base += ["data.max_prompt_length=512", "data.max_response_length=1024", "trainer.save_freq=-1"]
    return verl_cases.composed(*base, *overrides)


def validated(*overrides: str):
    config = composed(*overrides)
    validate_config(config, use_reference_policy=False, use_critic=False)
    return config


@pytest.mark.parametrize(
    "overrides, length",
    [
        ([], 1536),
        (["data.max_response_length=4096"], 4608),
        ([f"{ROLLOUT}.response_length=100"], 612),
        (["data.max_prompt_length=null", f"{ROLLOUT}.prompt_length=200"], 1224),
        ([f"{ROLLOUT}.max_model_len=2048"], 2048),
        ([f"{ROLLOUT}.max_model_len=null"], None),
    ],
)
def test_the_context_holds_prompt_and_answer(overrides, length):
    assert validated(*overrides).actor_rollout_ref.rollout.max_model_len == length


def test_a_context_that_would_cut_answers_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.max_model_len=1536 .*4608 .*max_model_len=auto"):
        validated(f"{ROLLOUT}.max_model_len=1536", "data.max_response_length=4096")


def test_the_context_is_no_longer_than_the_model(tmp_path, caplog):
    """VERL's own default has the same limit, and VERL refuses a larger context, but only once vLLM starts."""
    shape_config("tiny").save_pretrained(tmp_path)
    positions = shape_config("tiny").max_position_embeddings
    model = f"actor_rollout_ref.model.path={tmp_path}"
    config = validated(model, f"data.max_response_length={positions}")
    assert config.actor_rollout_ref.rollout.max_model_len == positions
    [warning] = [record for record in caplog.records if record.name == inputs.__name__]
    assert warning.args[2:] == (512 + positions, positions)
    assert (
        validated(
            model, "data.max_prompt_length=8", "data.max_response_length=8"
        ).actor_rollout_ref.rollout.max_model_len
        == 16
    )


@pytest.mark.parametrize("batch, mini, refused", [(8, 32, True), (48, 32, True), (64, 32, False), (32, 32, False)])
@pytest.mark.parametrize("loss", ["seq-mean-token-mean", "token-mean"])
def test_means_over_sequences_are_of_whole_mini_batches(batch, mini, refused, loss):
    """Means over tokens have none of the padding."""
    actor = "actor_rollout_ref.actor"
    overrides = [
        f"data.train_batch_size={batch}",
        f"{actor}.ppo_mini_batch_size={mini}",
        f"{actor}.use_dynamic_bsz=true",
    ]
    overrides += [f"{actor}.loss_agg_mode={loss}", f"{ROLLOUT}.log_prob_use_dynamic_bsz=true"]
    overrides += ["actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true"]
    if not refused or loss == "token-mean":
        validated(*overrides)
        return
    with pytest.raises(ValueError, match=f"train_batch_size={batch} .*ppo_mini_batch_size={mini} "):
        validated(*overrides)
    validated(*overrides, "trainer.val_before_train=true", "trainer.val_only=true")


@pytest.mark.parametrize("logger", ["[console,wandbb]", "wandbb"])
def test_an_unknown_logger_is_named(logger):
    with pytest.raises(ValueError, match=r"trainer\.logger has wandbb.*tensorboard"):
        validated(f"trainer.logger={logger}")


def test_a_logger_that_is_not_installed_is_named(monkeypatch):
    find = inputs.importlib.util.find_spec
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    with pytest.raises(ValueError, match=r"trainer\.logger has tensorboard.*pip install tensorboard"):
        validated("trainer.logger=[console,tensorboard]")


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_wandb_itself_is_asked_for_a_key(no_key):
    """The question runs in a process of its own. A run is not refused if that gives no answer within a minute."""
    asked = subprocess.run([sys.executable, "-c", inputs._ASK_WANDB], capture_output=True, text=True, timeout=300)
    assert asked.returncode == 1 and "Traceback" not in asked.stderr


def test_wandb_needs_a_key_or_to_be_offline(no_key, monkeypatch):
    answers = iter([1, 1, 0])
    monkeypatch.setattr(
        inputs.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, next(answers), stderr=b""),
    )
    wandb, environment = "trainer.logger=[console,wandb]", "+ray_kwargs.ray_init.runtime_env.env_vars"
    for logger in (wandb, "trainer.logger=tracking"):
        with pytest.raises(ValueError, match=r"trainer\.logger has wandb.*WANDB_API_KEY.*WANDB_MODE=offline"):
            validated(logger)
    validated(wandb)  # it has one
    validated(wandb, f"{environment}.WANDB_MODE=offline")
    validated(wandb, f"{environment}.WANDB_API_KEY=abc")
    monkeypatch.setenv("WANDB_MODE", "offline")
    validated(wandb)


def test_loggers_of_another_interpreter_are_not_looked_for(monkeypatch):
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: None)
    validated("trainer.logger=[tensorboard]", "ray_kwargs.ray_init.runtime_env.py_executable=/somewhere/python")


@pytest.mark.parametrize("moments, gb", [("float32", 91.4), ("bfloat16", 60.9)])
def test_a_disk_too_small_for_a_checkpoint_is_refused(monkeypatch, tmp_path, moments, gb):
    shape_config("qwen2.5-7b").save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    settings = [
        f"actor_rollout_ref.model.path={tmp_path}/model", f"trainer.default_local_dir={out}/new",
        f"actor_rollout_ref.actor.megatrain.optimizer_state_dtype={moments}",
    ]  # fmt: skip
    free = {}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(total=10**12, used=0, free=free["bytes"]))
    free["bytes"] = int((gb - 0.2) * 1e9)
    with pytest.raises(ValueError, match=rf"trainer\.default_local_dir=.*{gb} GB .*{gb - 0.2:.1f} GB"):
        validated(*settings, "trainer.save_freq=20")
    validated(*settings)  # saves nothing
    (out / "new" / "global_step_20").mkdir(parents=True)
    validated(*settings, "trainer.save_freq=20")  # goes on from one
    shutil.rmtree(out)
    free["bytes"] = int((gb + 0.2) * 1e9)
    validated(*settings, "trainer.save_freq=20")


def test_a_model_that_is_not_here_yet_has_no_size():
    assert inputs.checkpoint_bytes(composed("actor_rollout_ref.model.path=organisation/model")) is None
