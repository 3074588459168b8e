"""Whole VERL runs in processes of their own: GRPO both ways of selecting the strategy, resume, and SFT.

Every process that imports verl needs 6-10 s, so the checks are folded into four runs of a few steps. The GPU twins
train on CUDA; the rollout is the embedded one there too.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import listeners
import pandas as pd
import pytest
from verl_cases import save_tiny_model

from megatrain_rl.config import StreamConfig
from megatrain_rl.watch import report

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("grpo")
    save_tiny_model(str(path / "model"), layers=2)
    (path / "reward.py").write_text(REWARD)
    prompts = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"say {i % 10}"}],
            "reward_model": {"style": "rule", "ground_truth": str(i % 10)},
            "extra_info": {"index": i},
        }
        for i in range(32)
    ]
    pd.DataFrame(prompts).to_parquet(path / "rl.parquet")
    chats = [
        {"messages": [{"role": "user", "content": f"say {i % 10}"}, {"role": "assistant", "content": str(i % 10) * 3}]}
        for i in range(32)
    ]
    pd.DataFrame(chats).to_parquet(path / "sft.parquet")
    return path


class Run:
    """A running command of VERL's. `finish` waits and returns its metrics per step, or fails with the output's end."""

    def __init__(self, workspace: Path, name: str, command: list[str], device: str, **environment: str):
        self._metrics, self._log = workspace / f"{name}-{device}.jsonl", workspace / f"{name}-{device}.log"
        in_process = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        dropped = (*in_process, "VERL_PLATFORM", "RAY_ADDRESS")
        environment = {
            **{key: value for key, value in os.environ.items() if key not in dropped},
            **({"VERL_PLATFORM": "cpu"} if device == "cpu" else {}),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TQ_NUM_THREADS": "2",
            "VERL_FILE_LOGGER_PATH": str(self._metrics),
            **environment,
        }
        with self._log.open("w") as out:
            command = [sys.executable, "-m", *command]
            self.process = subprocess.Popen(command, cwd=workspace, env=environment, stdout=out, stderr=out)

    def finish(self) -> dict[int, dict[str, float]]:
        assert self.process.wait() == 0, self.log()[-8000:]
        steps: dict[int, dict[str, float]] = {}
        for entry in map(json.loads, self._metrics.read_text().splitlines()):
            steps.setdefault(entry["step"], {}).update(entry["data"])
        return steps

    def wait_for_ray(self) -> None:
        deadline = time.monotonic() + 120
        while "Started a local Ray instance" not in self.log() and self.process.poll() is None:
            assert time.monotonic() < deadline, self.log()[-8000:]
            time.sleep(0.2)

    def stop(self) -> None:
        """End a run that nobody waited for, as Ctrl-C does, so that Ray's processes end too."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)

    def log(self) -> str:
        return self._log.read_text()

    def settings(self) -> list[tuple[str, str]]:
        """The settings that VERL printed, as (name, value)."""
        return printed_settings(one_line(self.log()))


def one_line(log: str, *, left_out: re.Pattern[str] | None = None) -> str:
    """A run's output in one line, without colours and names of processes: Ray cuts lines where it likes.

    left_out: matches lines that are not wanted.
    """
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;]*m", "", log))
    wanted = (line for line in lines if left_out is None or not left_out.search(line))
    return " ".join(re.sub(r"^\(\w+ pid=\d+\) ?", "", line) for line in wanted)


def printed_settings(text: str) -> list[tuple[str, str]]:
    return re.findall(r"'(\w+)' *: *('[^']*'|[\w.+-]+)", text)


def grpo(workspace: Path, name: str, *overrides: str, device: str = "cpu", **environment: str) -> Run:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    settings = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={workspace}/rl.parquet", f"data.val_files={workspace}/rl.parquet",
        "data.train_batch_size=8", "data.max_prompt_length=64", "data.max_response_length=12",
        "data.dataloader_num_workers=0", "data.filter_overlong_prompts=false",
        f"actor_rollout_ref.model.path={workspace}/model",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.optim.lr=3e-3", f"{actor}.ppo_mini_batch_size=8", f"{actor}.ppo_micro_batch_size_per_gpu=3",
        f"{actor}.use_kl_loss=true", f"{actor}.kl_loss_coef=0.01", f"{actor}.calculate_entropy=true",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.name=embedded", f"{rollout}.n=2", f"{rollout}.temperature=0.8",
        f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.agent.num_workers=1", f"{rollout}.free_cache_engine=false",
        "reward.num_workers=1", f"reward.custom_reward_function.path={workspace}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"trainer.device={device}", "trainer.nnodes=1", "trainer.n_gpus_per_node=1", "trainer.logger=[file]",
        "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.total_epochs=10",
        f"trainer.default_local_dir={workspace}/ckpt-{device}",
        "+ray_kwargs.ray_init.address=local",
        "ray_kwargs.ray_init.num_cpus=8", "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=false", "+ray_kwargs.ray_init.object_store_memory=200000000",
    ]  # fmt: skip
    return Run(workspace, name, ["verl.trainer.main_ppo", *settings, *overrides], device, **environment)


def assert_healthy(step: dict[str, float]) -> None:
    assert step["actor/grad_norm"] > 0 and step["actor/skipped_steps"] == 0
    assert 0 < step["actor/entropy"] < 6


def assert_watched(step: dict[str, float], folder: Path) -> None:
    """The log of a step has seconds of every stage, tokens/s, memory and the log-prob gap; the pictures are there."""
    stages = ("gen", "old_log_prob", "ref", "update_actor", "update_weights", "step")
    assert all(step[f"timing_s/{stage}"] > 0 for stage in stages)
    tokens_per_s = step["perf/total_num_tokens"] / step["timing_s/step"]
    assert step["perf/throughput"] == pytest.approx(tokens_per_s)
    assert 0.3 < step["megatrain/trainer_rss_peak_gib"] < step["megatrain/run_rss_peak_gib"]
    assert 0 <= step["megatrain/rollout_log_prob_gap_mean"] <= step["megatrain/rollout_log_prob_gap_max"] < 1e-3
    assert 0 <= step["megatrain/optimizer_wait_s"] < step["timing_s/step"]
    assert (folder / "memory.png").stat().st_size > 10_000 and (folder / "stages.png").stat().st_size > 10_000


def test_model_engine_trains_saves_and_resumes(workspace, device):
    """KL is 0 on the first step, grows, and goes on from the frozen reference in the resumed process."""
    knobs = "actor_rollout_ref.actor.megatrain"
    fp32 = [f"{knobs}.param_dtype=float32", f"{knobs}.grad_dtype=float32", "actor_rollout_ref.rollout.dtype=float32"]
    common = ["model_engine=megatrain", *fp32]
    two_steps = ["trainer.total_training_steps=2", "trainer.save_freq=2"]
    with listeners.watched() as (environment, sockets):
        first = grpo(workspace, "first", *common, *two_steps, device=device, **environment).finish()
    assert listeners.beyond_loopback(sockets) == []
    listening = " ".join(socket.process for socket in sockets)
    for process in ("gcs_server", "raylet", "ray::DashboardAgent", "ray::WorkerDict", "ray::TransferQueueController"):
        assert process in listening, "it does listen, so it would be seen elsewhere too"
    more = ["trainer.total_training_steps=3", "trainer.save_freq=-1"]
    resumed = grpo(workspace, "resumed", *common, *more, device=device).finish()
    assert sorted(first) == [1, 2] and sorted(resumed) == [3]
    steps = first | resumed
    for step in steps.values():
        assert_healthy(step)
        # one update a batch: there was no pass for old log-probs, whose metrics come from the update
        assert step["actor/ppo_kl"] == 0 and step["timing_s/old_log_prob"] < 0.2 * step["timing_s/ref"]
        # the rollout samples at temperature 0.8 with the weights it was sent, the first after a resume included
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert_watched(step, workspace / f"ckpt-{device}" / "megatrain")
        if device == "cuda":  # what allocates beside the trainer, as NCCL would, is in the budget too
            assert step["megatrain/trainer_gpu_peak_gib"] * 2**30 <= StreamConfig().gpu_budget_gb * 1e9
    record = (workspace / f"ckpt-{device}" / "megatrain" / "run.jsonl").read_text().splitlines()
    # both runs: a start, their steps, and what came after the last
    assert [json.loads(line).get("step", "start") for line in record] == ["start", 1, 2, None, "start", 3, None]
    startup_s = report.startup_s(workspace / f"ckpt-{device}" / "megatrain")
    assert startup_s["rollout engine"] > 0 and min(startup_s.values()) >= 0
    first_look = report.read(workspace / f"ckpt-{device}" / "megatrain")[0]["memory"]["time"][0]
    watched_before_the_record_s = report.start(workspace / f"ckpt-{device}" / "megatrain") - first_look
    assert watched_before_the_record_s > startup_s["rollout engine"], "the start-up is in it"
    assert abs(steps[1]["actor/kl_loss"]) < 1e-6
    assert steps[2]["actor/kl_loss"] > 1e-4 and steps[3]["actor/kl_loss"] > 1e-4

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(workspace / f"ckpt-{device}" / "global_step_2" / "actor" / "huggingface")


@pytest.fixture(scope="module")
def side_by_side(workspace, request) -> dict[str, Run]:
    """Two independent runs at the same time, because most of a run is one process importing after the other.

    The second begins when the first has its Ray: Ray gives itself 30 s to start.
    """
    short = ["trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.resume_mode=disable"]
    strategy = ["actor_rollout_ref.actor.strategy=megatrain", "actor_rollout_ref.ref.strategy=megatrain"]
    knobs = "actor_rollout_ref.actor.megatrain"
    runs = {"dp": grpo(workspace, "dp", *strategy, *short, "algorithm.rollout_correction.rollout_is=token")}
    request.addfinalizer(runs["dp"].stop)
    runs["dp"].wait_for_ray()
    runs["bypass"] = grpo(
        workspace, "bypass", "model_engine=megatrain", f"{knobs}.param_dtype=float32", f"{knobs}.grad_dtype=float32",
        f"{knobs}.share_prompts=true",
        "actor_rollout_ref.rollout.dtype=float32", "algorithm.rollout_correction.bypass_mode=true",
        "actor_rollout_ref.actor.use_kl_loss=false", "trainer.logger=[file,wandb,tensorboard]", *short,
        f"trainer.default_local_dir={workspace}/ckpt-bypass", WANDB_MODE="offline", WANDB_DIR=str(workspace),
        TENSORBOARD_DIR=str(workspace / "tensorboard"),
    )  # fmt: skip
    request.addfinalizer(runs["bypass"].stop)
    return runs


def test_strategy_alone_on_the_default_model_engine(side_by_side):
    """Its importance weights stand for the difference between rollout and trainer, which is tiny: they are about 1."""
    steps = side_by_side["dp"].finish()
    for step in steps.values():
        assert_healthy(step)
        assert 0.98 < step["rollout_corr/rollout_is_mean"] < 1.02
    # bf16: the reference pass and the update cut their packs differently
    assert abs(steps[1]["actor/kl_loss"]) < 1e-5 and steps[2]["actor/kl_loss"] > 1e-3
    assert ("lora_adapter_path", "'megatrain-frozen-reference'") in side_by_side["dp"].settings()


def test_rollout_log_probs_in_place_of_an_old_log_prob_pass(side_by_side, workspace):
    """bypass_mode, shared prompts, no KL term, tensorboard, and wandb without a network."""
    for step in side_by_side["bypass"].finish().values():
        assert step["actor/grad_norm"] > 0 and step["actor/skipped_steps"] == 0
        # one update a batch, with the weights that sampled it: the ratio is 1 to rounding, though the trainer computed
        # each prompt once and the rollout engine did not
        assert abs(step["actor/ppo_kl"]) < 1e-5 and step["actor/pg_clipfrac"] == 0
        # VERL logs these with the log-probs of that pass, as the runs above show, so there was none
        assert not step.keys() & {"actor/entropy", "training/rollout_probs_diff_max"}
        assert not any(key.startswith("megatrain/rollout_log_prob_gap") for key in step)
        assert "actor/kl_loss" not in step and "timing_s/ref" not in step
    [offline] = (workspace / "wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))
    assert list((workspace / "tensorboard").glob("events.*"))


def test_sft(workspace, device):
    """VERL's SFT trainer: the loss falls, validation runs, the checkpoint is a HF model."""
    settings = [
        "engine=megatrain", "optim=megatrain", "engine.param_dtype=float32", "optim.lr=1e-2",
        f"data.train_files={workspace}/sft.parquet", f"data.val_files={workspace}/sft.parquet",
        "data.train_batch_size=8", "data.micro_batch_size_per_gpu=3", "data.use_dynamic_bsz=false",
        "data.max_length=64", "data.num_workers=0", f"model.path={workspace}/model",
        "+model.override_config.attn_implementation=sdpa",
        f"trainer.default_local_dir={workspace}/sft_ckpt-{device}", "trainer.total_epochs=2", "trainer.logger=[file]",
        f"trainer.device={device}", "trainer.save_freq=-1", "trainer.test_freq=8",
    ]  # fmt: skip
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node=1", "-m", "verl.trainer.sft_trainer"]
    steps = Run(workspace, "sft", [*launch, *settings], device).finish()
    losses = [step["train/loss"] for step in steps.values()]
    assert len(losses) == 8 and losses[-1] < 0.7 * losses[0]
    assert steps[8]["val/loss"] < losses[0] and steps[8]["train/grad_norm"] > 0
    assert all(step["megatrain/trainer_rss_peak_gib"] > 0.3 for step in steps.values())
    assert (workspace / f"sft_ckpt-{device}" / "megatrain" / "memory.png").exists()

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(workspace / f"sft_ckpt-{device}" / "global_step_8" / "huggingface")
