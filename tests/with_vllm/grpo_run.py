"""The files and the command line of a GRPO run through VERL with vLLM as its rollout engine.

Called by test_grpo_run.py.
"""

import json
import re
import sys
from pathlib import Path

import pandas as pd

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS))
import tiny  # noqa: E402
import verl_cases  # noqa: E402

# What vLLM logs when it is put to sleep or woken, on CUDA and on the CPU.
SLEEP_OR_WAKE = re.compile("fall asleep|to wake up|is sleeping|is not sleeping|sleep mode is not supported")

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""
GPU_BUDGET_GB = 4
# Every step asks the same questions, longer than a block of vLLM's cache: an answer from a stale cache would be found
# out.
QUESTION = "here is a question that takes more tokens than one block of the cache holds, and it is question number {}"


def make_workspace(folder: Path) -> None:
    """A tiny Qwen2 with heads of a size that vLLM has, its tokenizer, eight questions and a reward."""
    model = verl_cases.save_tiny_model(str(folder / "model"))
    special = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = tiny.config(
        layers=2, vocab_size=verl_cases.VOCAB, hidden_size=128, intermediate_size=256, head_dim=32, initializer_range=0.1,
        max_position_embeddings=512, **special,
    )  # fmt: skip
    tiny.saved(tiny.model(config), Path(model))
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": QUESTION.format(i)}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
        }
        for i in range(8)
    ]
    pd.DataFrame(rows).to_parquet(folder / "rl.parquet")


def command(folder: Path, device: str) -> list[str]:
    """Arguments of the interpreter. fp32 throughout, so that rollout and trainer agree to rounding."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    settings = [
        "model_engine=megatrain", "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/rl.parquet", f"data.val_files={folder}/rl.parquet",
        "data.train_batch_size=8", "data.max_prompt_length=160", "data.max_response_length=12",
        "data.dataloader_num_workers=0", "data.filter_overlong_prompts=false",
        f"actor_rollout_ref.model.path={folder}/model",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.megatrain.param_dtype=float32", f"{actor}.megatrain.grad_dtype=float32",
        f"{actor}.megatrain.optimizer=torch", f"{actor}.megatrain.gpu_budget_gb={GPU_BUDGET_GB}", f"{actor}.optim.lr=3e-3", f"{actor}.ppo_mini_batch_size=8",
        f"{actor}.ppo_micro_batch_size_per_gpu=8", f"{actor}.use_kl_loss=true", f"{actor}.kl_loss_coef=0.01",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.name=vllm", f"{rollout}.n=2", f"{rollout}.temperature=0.8", f"{rollout}.dtype=float32",
        f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.enforce_eager=true", f"{rollout}.max_model_len=256", f"{rollout}.max_num_seqs=32",
        f"{rollout}.max_num_batched_tokens=1024", f"+{rollout}.engine_kwargs.vllm.block_size=32",
        f"+{rollout}.engine_kwargs.vllm.distributed_executor_backend=uni",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=1",
        f"{rollout}.agent.num_workers=1", f"{rollout}.n_gpus_per_node=1",
        "reward.num_workers=1", f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"trainer.device={device}", "trainer.nnodes=1", "trainer.n_gpus_per_node=1", "trainer.logger=[file]",
        "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=1", "trainer.resume_mode=auto",
        "trainer.total_epochs=1000", "trainer.max_actor_ckpt_to_keep=2", f"trainer.default_local_dir={folder}/ckpt",
        "+ray_kwargs.ray_init.address=local", "ray_kwargs.ray_init.num_cpus=8", "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=false", "+ray_kwargs.ray_init.object_store_memory=200000000",
    ]  # fmt: skip
    settings += [f"{rollout}.gpu_memory_utilization=0.1" if device == "cpu" else f"{actor}.megatrain.card_gb=24"]
    return ["-m", "verl.trainer.main_ppo", *settings]


def environment(folder: Path) -> dict[str, str]:
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "TQ_NUM_THREADS": "2",
        "VLLM_LOGGING_LEVEL": "INFO",  # it says there when the cache is emptied and when it sleeps
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
    }


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics of every step so far."""
    steps: dict[int, dict[str, float]] = {}
    file = folder / "metrics.jsonl"
    for entry in map(json.loads, file.read_text().splitlines() if file.exists() else []):
        steps.setdefault(entry["step"], {}).update(entry["data"])
    return steps
