#!/usr/bin/env bash
# GRPO of Qwen3-32B on one GPU of 80 GB and a host of 512 GiB; vLLM holds the weights in FP8.
#
#   python examples/prepare_gsm8k.py data/gsm8k
#   MODEL_PATH=models/Qwen3-32B bash recipes/run_qwen3_32b_grpo.sh [Hydra overrides]
#
# Settings by environment: recipes/grpo_common.sh. Memory, 1 GB = 1e9 bytes, 32.8 B parameters:
#   GPU    trainer 9 (a hard cap; its transfer bucket included) + reserve 3 (grows with rollout.max_num_seqs) + vLLM
#          the rest: 68 of an 80 GB card, of which about 34 weights (FP8 layers, bf16 embedding and output matrix). KV
#          cache takes 262 KB a token.
#   host   458.7 state + 0.66 per 1,000 tokens of a mini-batch for layer inputs + about 15 for Ray, vLLM and VERL, of
#          549.8. With a KL term the model's files (65.5) are read through the page cache: add
#          actor_rollout_ref.actor.megatrain.optimizer_state_dtype=bfloat16, which saves 131.
#   disk   394 a checkpoint (complete state), every 20 steps; the last one is kept until the next is complete: 788
# Rollouts in FP8 differ from the trainer's bf16 by more than rounding: truncated importance sampling
# (algorithm.rollout_correction.rollout_is=token) weighs their tokens accordingly.
set -euo pipefail
# shellcheck source=recipes/grpo_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/grpo_common.sh"

grpo qwen3_32b_grpo Qwen/Qwen3-32B \
  actor_rollout_ref.actor.megatrain.gpu_budget_gb=9 \
  actor_rollout_ref.rollout.quantization=fp8 algorithm.rollout_correction.rollout_is=token \
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1536 \
  -- "$@"
