#!/usr/bin/env bash
# GRPO of Qwen2.5-7B on one GPU of 80 GB or more, vLLM resident beside the trainer.
#
#   python examples/prepare_gsm8k.py data/gsm8k
#   MODEL_PATH=models/Qwen2.5-7B-Instruct bash recipes/run_qwen2_5_7b_grpo.sh [Hydra overrides]
#
# Settings by environment: recipes/grpo_common.sh. Memory, 1 GB = 1e9 bytes, 7.62 B parameters:
#   GPU    trainer 9 (a hard cap; its transfer bucket included) + reserve 3 (grows with rollout.max_num_seqs) + vLLM
#          the rest: 68 of an 80 GB card, of which 15.2 weights. KV cache takes 57 KB a token.
#   host   106.7 state (weights, residual, moments in fp32, gradients) + 0.2 per 1,000 tokens of a mini-batch for layer
#          inputs + about 15 for Ray, vLLM and VERL. A host of 128 GiB (137 GB) holds that without a reference. With a
#          KL term (actor_rollout_ref.actor.use_kl_loss=true) the model's files are read through the page cache, 15.2
#          that should stay there: on 128 GiB add actor_rollout_ref.actor.megatrain.optimizer_state_dtype=bfloat16,
#          which saves 30.5.
#   disk   91 a checkpoint (complete state), every 20 steps; the last one is kept until the next is complete: 183
set -euo pipefail
# shellcheck source=recipes/grpo_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/grpo_common.sh"

grpo qwen2_5_7b_grpo Qwen/Qwen2.5-7B-Instruct \
  actor_rollout_ref.actor.megatrain.gpu_budget_gb=9 \
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1152 \
  -- "$@"
