"""A trainer's promise about GPU memory: it stays inside its budget, whatever others in the process do."""

import gc
import os
import subprocess
import sys

import pytest
import tiny
import torch

from megatrain_rl.batch import pack_sequences
from megatrain_rl.bench.data import random_sequences
from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.objectives import NegativeLogLikelihood, ObjectiveOutput
from megatrain_rl.planner import CONTEXT_BYTES, PACK_MULTIPLE
from megatrain_rl.trainer import StreamTrainer
from verl_patches import engine_memory_cap

pytestmark = pytest.mark.gpu


class EntropyRegularized(NegativeLogLikelihood):
    """Needs the head's largest backward."""

    def __call__(self, stats, pack):
        return ObjectiveOutput(loss=super().__call__(stats, pack).loss - 1e-6 * stats.entropy_T.sum())


@pytest.mark.parametrize(
    "shape, layers, budget",
    [("qwen2.5-7b", 3, 6.0), ("qwen2.5-7b", 3, 9.0), ("qwen2.5-1.5b", 3, 4.0), ("qwen3-32b", 2, 9.0)],
)
def test_the_budget_is_kept_at_real_width(shape, layers, budget):
    """What is allocated stays under the plan's peak, and the process inside the budget by NVML.

    Packs are of the plan's own size, then the longest sequence it admits, with entropy in the loss and gradients that
    come back.
    """
    pynvml = pytest.importorskip("pynvml")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = shape_config(shape, layers=layers)
    trainer = StreamTrainer.from_config(config, config=StreamConfig(gpu_budget_gb=budget), adamw=AdamWConfig())
    plan = trainer.plan
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    longest = torch.randint(0, config.vocab_size, (plan.max_pack_tokens,))
    for data in (random_sequences(3 * trainer.pack_tokens, 1024, config.vocab_size, seed=0), [longest]):
        torch.cuda.reset_peak_memory_stats()
        packs = pack_sequences(data, max_tokens=trainer.pack_tokens)
        for _ in range(2):
            trainer.forward_backward(packs, EntropyRegularized(packs), entropy=True)
        trainer.optim_step()
        trainer.synchronize()
        tokens = -(-max(p.num_tokens for p in packs) // PACK_MULTIPLE) * PACK_MULTIPLE
        planned, allocated = plan.peak(tokens), torch.cuda.max_memory_allocated()
        print(
            f"{shape} budget {budget}: {len(packs)} packs of {tokens}, head chunk {plan.head_chunk(tokens)}, planned "
            f"{planned / 1e9:.2f} GB, allocated {allocated / 1e9:.2f}, reserved {torch.cuda.max_memory_reserved() / 1e9:.2f}, "
            f"cap {plan.gpu_cap_bytes / 1e9:.2f}, retries {torch.cuda.memory_stats().get('num_alloc_retries', 0)}"
        )
        assert allocated <= planned
        # no retry: nothing had to be given back to the driver to find room, so memory was never in too many pieces
        assert torch.cuda.memory_stats().get("num_alloc_retries", 0) == retries
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    used = next(p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid())
    context = used - torch.cuda.memory_reserved()
    print(f"context {context / 1e9:.2f} GB")
    assert context <= CONTEXT_BYTES
    assert torch.cuda.max_memory_reserved() + context <= budget * 1e9
    trainer.close()


def test_trainers_one_after_the_other_share_the_budget(tmp_path):
    """A closed trainer's memory is there for the next, whatever its size, and two at once have each their own."""
    directory = tiny.saved(tiny.model(tiny.config(layers=3), dtype=torch.bfloat16), tmp_path)
    packs, objective = tiny.packs(tiny.sequences()), tiny.WeightedLoss(tiny.token_weights(tiny.sequences()))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def use(trainer):
        trainer.forward_backward(packs, objective, final=True)
        assert trainer.optim_step().stepped

    for budget in (4.0, 3.0, 5.0, 5.0):
        trainer = tiny.trainer(directory, device="cuda", param_dtype="bfloat16", gpu_budget_gb=budget)
        use(trainer)
        assert torch.cuda.memory_reserved() - before <= trainer.plan.gpu_cap_bytes
        trainer.close()
    pair = [tiny.trainer(directory, device="cuda", param_dtype="bfloat16", gpu_budget_gb=3.0) for _ in range(2)]
    for trainer in pair:
        use(trainer)
    assert torch.cuda.memory_reserved() - before <= 2 * pair[0].plan.gpu_cap_bytes
    pair[0].close()
    use(pair[1])
    pair[1].close()
    del trainer, pair
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 200e6  # workspaces


def test_memory_that_the_process_holds_beside_the_trainer_is_named(tmp_path):
    directory = tiny.saved(tiny.model(tiny.config(layers=3), dtype=torch.bfloat16), tmp_path)
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.empty(3_000_000_000, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match=r"already holds [3-9]\.\d+ GB.*gpu_budget_gb"):
        tiny.trainer(directory, device="cuda", param_dtype="bfloat16", gpu_budget_gb=3.0)
    del held
    gc.collect()  # what was begun of the trainer
    torch.cuda.empty_cache()
    tiny.trainer(directory, device="cuda", param_dtype="bfloat16", gpu_budget_gb=3.0).close()


def test_the_reservation_stays_when_others_empty_the_cache(tmp_path):
    """VERL empties the cache once the model is set up, and then a rollout engine measures what is free."""
    directory = tiny.saved(tiny.model(tiny.config(layers=3), dtype=torch.bfloat16), tmp_path)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    held = []

    def others(trainer):
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved() - before)

    trainer = tiny.trainer(directory, device="cuda", param_dtype="bfloat16", gpu_budget_gb=3.0, on_reserved=others)
    others(trainer)
    trainer.warm_up()
    others(trainer)
    assert min(held) > 0.9 * trainer.plan.gpu_cap_bytes and max(held) <= trainer.plan.gpu_cap_bytes
    trainer.close()


def test_expandable_segments_of_others_do_not_matter(tmp_path):
    """VERL switches them off and on around its weight transfer, and empties the cache."""
    directory = tiny.saved(tiny.model(tiny.config(layers=3), dtype=torch.bfloat16), tmp_path)
    packs = tiny.packs(tiny.sequences())
    trainer = tiny.trainer(directory, device="cuda", param_dtype="bfloat16")
    results = []
    for setting in ("False", "True", "False"):
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{setting}")
        torch.cuda.empty_cache()
        results.append([s.log_probs_T for s in trainer.log_probs(packs)])
        trainer.forward_backward(packs, tiny.WeightedLoss(tiny.token_weights(tiny.sequences())))
        trainer.zero_grad()
        assert torch.cuda.max_memory_reserved() <= trainer.plan.gpu_cap_bytes
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    trainer.close()


def test_torch_reads_the_bound_of_a_rollout_engine():
    """verl_patches/engine_memory_cap.py hands it on in the environment. At the bound, unused blocks go first."""
    code = """
import torch
total = torch.cuda.get_device_properties(0).total_memory
for part in (0.01, 0.012, 0.014):  # each needs a new block: the one before is too small
    torch.empty(int(part * total), dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() <= 0.02 * total
try:
    torch.empty(int(0.03 * total), dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("bounded")
"""
    environment = {name: value for name, value in os.environ.items() if name not in engine_memory_cap.VARIABLES}
    environment[engine_memory_cap.VARIABLES[1]] = f"{engine_memory_cap.OPTION}:0.02"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "bounded\n", done.stderr
