#!/usr/bin/env bash
# GRPO of Qwen2.5-1.5B on one GPU of 24 GB and a host of 64 GB, vLLM resident beside the trainer.
#
#   python examples/prepare_gsm8k.py data/gsm8k
#   MODEL_PATH=models/Qwen2.5-1.5B-Instruct bash recipes/run_qwen2_5_1_5b_grpo.sh [Hydra overrides]
#
# Settings by environment: recipes/grpo_common.sh. Memory, 1 GB = 1e9 bytes, 1.54 B parameters:
#   GPU    trainer 4 (a hard cap; its transfer bucket included) + reserve 3 (grows with rollout.max_num_seqs) + vLLM
#          the rest: 17 of a 24 GB card, of which 3.1 weights. KV cache takes 29 KB a token.
#   host   21.6 state + 0.09 per 1,000 tokens of a mini-batch for layer inputs + about 15 for Ray, vLLM and VERL; with a
#          KL term the model's files (3.1) in the page cache.
#   disk   18.5 a checkpoint (complete state), every 20 steps; the last one is kept until the next is complete: 37
set -euo pipefail
# shellcheck source=recipes/grpo_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/grpo_common.sh"

grpo qwen2_5_1_5b_grpo Qwen/Qwen2.5-1.5B-Instruct \
  actor_rollout_ref.actor.megatrain.gpu_budget_gb=4 \
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=512 \
  -- "$@"
