"""The parts in which the GPU tests run: `bash tests/run.sh -m gpu_part1` runs one.

A part is to fit five minutes on a fresh machine, compilation included. Every test marked `gpu` gets the mark of its
part by its file (conftest.py); test_gpu_parts.py holds that no test has none or two.
"""

from pathlib import Path

TESTS = Path(__file__).parent

# Files and folders of tests by part.
GPU_PARTS = {
    # numbers at tiny sizes
    "gpu_part1": (
        "test_head.py", "test_trainer.py", "checkpoint", "test_invariance.py", "test_overlap.py", "host", "optim",
        "transfer/test_arena.py", "transfer/test_transfer.py", "model/test_attention_gpu.py", "examples",
        "test_shared_prompts.py",
    ),
    # real widths: compilation, and memory under the hard cap
    "gpu_part2": ("streaming", "transfer/test_budget_gpu.py"),
    # late streams
    "gpu_part3": ("transfer/test_lanes_gpu.py",),
    # runs through VERL with the embedded rollout
    "gpu_part4": ("verl_plugin",),
    # a resident vLLM engine
    "gpu_part5": ("with_vllm/test_vllm.py",),
    # one test: a run through VERL with vLLM, killed twice and resumed, so with two starts of vLLM. It took 310 s on a
    # fresh machine, the one part over five minutes: a second test would have to pay for the first run again
    "gpu_part6": ("with_vllm/test_grpo_run.py",),
}  # fmt: skip


def gpu_parts_of(file: Path) -> list[str]:
    """Parts that `file` belongs to: one, when the table is right."""
    return [part for part, places in GPU_PARTS.items() if any(file.is_relative_to(TESTS / place) for place in places)]
