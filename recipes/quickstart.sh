#!/usr/bin/env bash
# GRPO that learns, from nothing, on a machine without a GPU.
#
#   bash recipes/quickstart.sh            SEED=2 bash recipes/quickstart.sh
#   ROLLOUT=vllm PYTHON=python3 bash recipes/quickstart.sh      the same on a GPU, with vLLM resident beside the trainer
#
# Needs Python 3.10-3.12 and a C++ compiler. Takes about five minutes on two cores once everything is installed.
#   1. makes a venv and installs this checkout with the extra `quickstart`
#   2. builds a byte-level tokenizer, a small random Qwen2 (0.2 M parameters) and a task: adding three-digit numbers
#      column by column, with a rule reward (recipes/quickstart/task.py)
#   3. warms the model up by supervised fine-tuning on careless demonstrations (VERL's SFT trainer, engine=megatrain)
#   4. runs GRPO with a KL loss to the warmed-up policy (verl.trainer.main_ppo, model_engine=megatrain,
#      rollout.name=$ROLLOUT)
#   5. measures both checkpoints on problems that were never trained on, the same way
# It leaves in outputs/quickstart/seed-$SEED: reward.png, the logs and metrics of every stage, VERL checkpoints, and
# checkpoint/, which AutoModelForCausalLM loads. The last line is `held-out reward: A -> B`, after warm-up and after
# GRPO.
#
# Settings (environment):
#   SEED             seeds model, data and sampling (1)
#   ROLLOUT          embedded: on the CPU; vllm: on a GPU, by an interpreter PYTHON that has this package, VERL and
#                    vLLM, a model of 0.3 M parameters with weights in bf16 (embedded)
#   QUICKSTART_VENV  the venv to make or to reuse (.venv-quickstart)
#   QUICKSTART_OUT   the output folder (outputs/quickstart/seed-$SEED)
#   PYTHON           the interpreter for a new venv (the first of python3.12, 3.11, 3.10, python3 that fits)
#   TORCH_SPEC       what to install if the venv has no torch (torch==2.13.0)
#   GRPO_STEPS       GRPO steps (30)
#   HIDDEN           width of the model (96; 128 with vLLM)
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
HERE=$ROOT/recipes/quickstart
SEED=${SEED:-1}
ROLLOUT=${ROLLOUT:-embedded}
VENV=${QUICKSTART_VENV:-$ROOT/.venv-quickstart}
OUT=${QUICKSTART_OUT:-$ROOT/outputs/quickstart/seed-$SEED}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
case $OUT in /*) ;; *) OUT=$PWD/$OUT ;; esac
RUN_PYTHON=$VENV/bin/python
TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}
SFT_STEPS=160
GRPO_STEPS=${GRPO_STEPS:-30}

fail() {
  echo "quickstart: $*" >&2
  exit 1
}

# logged NAME LOG COMMAND...: run quietly; on failure one line that says where to look
logged() {
  local name=$1 log=$2
  shift 2
  "$@" > "$log" 2>&1 || fail "$name failed; see $log"
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.12 python3.11 python3.10 python3}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2> /dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "needs Python 3.10, 3.11 or 3.12; set PYTHON to one"
}

# Everything importable, the plug-in visible to VERL, and the package the one of this checkout
is_installed() {
  (cd / && "$VENV/bin/python" - "$ROOT") << 'EOF' 2> /dev/null
import importlib.metadata, importlib.util, pathlib, sys
wanted = ("torch", "transformers", "verl", "ray", "transfer_queue", "matplotlib", "tqdm", "megatrain_rl")
found = {name: importlib.util.find_spec(name) for name in wanted}
assert all(found.values())
assert pathlib.Path(found["megatrain_rl"].origin).is_relative_to(sys.argv[1])
assert any(e.name == "megatrain" for e in importlib.metadata.entry_points(group="verl.plugins"))
EOF
}

install() {
  if [ "$ROLLOUT" = vllm ]; then
    RUN_PYTHON=${PYTHON:-python3}
    "$RUN_PYTHON" -c 'import megatrain_rl, verl, vllm, tqdm, matplotlib' > "$OUT/install.log" 2>&1 \
      || fail "$RUN_PYTHON lacks megatrain_rl, verl, vllm, tqdm or matplotlib; pip install '.[vllm]', or set PYTHON; see $OUT/install.log"
    return
  fi
  if ! "$VENV/bin/python" -m pip --version > /dev/null 2>&1; then
    local interpreter
    interpreter=$(find_python) || exit 1
    logged "making the venv $VENV (does $interpreter have venv and pip?)" "$OUT/install.log" "$interpreter" -m venv --clear "$VENV"
  fi
  is_installed && return
  local python=$VENV/bin/python
  local pip=("$python" -m pip install)
  echo "installing into $VENV (log: $OUT/install.log)"
  # torch by pip in any case: a pip configuration may point it at a local build, which uv would not read
  "$python" -c 'import torch' 2> /dev/null || logged "installing $TORCH_SPEC" "$OUT/install.log" "${pip[@]}" "$TORCH_SPEC"
  if command -v uv > /dev/null; then pip=(uv pip install --python "$python"); fi
  logged "installing megatrain-rl" "$OUT/install.log" "${pip[@]}" -e "$ROOT[quickstart]"
}

# stage NAME STEPS FILE COMMAND...: a bar from VERL's metrics, the output in FILE.log, the metrics in FILE.jsonl
stage() {
  local name=$1 steps=$2 file=$3
  shift 3
  "$RUN_PYTHON" "$HERE/progress.py" "$name" "$steps" "$OUT/$file.log" "$OUT/$file.jsonl" -- "$@"
}

evaluate() {
  logged "evaluating $1" "$OUT/evaluate.log" \
    "$RUN_PYTHON" "$HERE/evaluate.py" "$1" "$OUT/data/held_out.parquet" "$2" "$SEED"
}

# One process needs no torchrun, whose store listens on every interface: these variables are what it would set, and a
# file in the place of the store.
warm_up() {
  rm -f "$OUT/sft.store"
  stage "SFT warm-up" "$SFT_STEPS" sft \
    env RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo \
    DIST_INIT_METHOD="file://$OUT/sft.store?rank=0&world_size=1" \
    "$RUN_PYTHON" -m verl.trainer.sft_trainer \
    engine=megatrain optim=megatrain engine.param_dtype=$DTYPE engine.grad_dtype=float32 \
    model.path="$OUT/data/model" model.use_remove_padding=false \
    data.train_files="$OUT/data/sft.parquet" data.val_files=null data.max_length=64 data.num_workers=0 \
    data.train_batch_size=64 data.use_dynamic_bsz=true data.max_token_len_per_gpu=8192 \
    optim.lr=3e-3 optim.lr_warmup_steps=10 \
    trainer.total_epochs=10 trainer.total_training_steps="$SFT_STEPS" trainer.seed="$SEED" \
    trainer.save_freq=-1 trainer.test_freq=-1 trainer.resume_mode=disable trainer.device=$DEVICE \
    trainer.logger='[console,file]' trainer.project_name=quickstart trainer.experiment_name=sft \
    trainer.default_local_dir="$OUT/sft"
}

# On a CPU the logical GPU and the eight logical cores are for VERL's placement, which counts accelerators; nothing uses
# a GPU.
grpo() {
  stage GRPO "$GRPO_STEPS" grpo \
    "$RUN_PYTHON" -m verl.trainer.main_ppo model_engine=megatrain \
    actor_rollout_ref.actor.megatrain.param_dtype=$DTYPE actor_rollout_ref.actor.megatrain.grad_dtype=float32 \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=false \
    actor_rollout_ref.model.path="$SFT_CHECKPOINT" actor_rollout_ref.model.use_remove_padding=false \
    data.train_files="$OUT/data/train.parquet" data.val_files="$OUT/data/held_out.parquet" data.seed="$SEED" \
    data.train_batch_size=16 data.max_prompt_length=64 data.max_response_length=8 data.dataloader_num_workers=0 \
    data.filter_overlong_prompts=false \
    actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.optim.lr_scheduler_type=cosine \
    actor_rollout_ref.actor.optim.min_lr_ratio=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.data_loader_seed="$SEED" \
    actor_rollout_ref.rollout.name=$ROLLOUT actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.dtype=$DTYPE \
    actor_rollout_ref.rollout.seed="$SEED" actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.n_gpus_per_node=1 actor_rollout_ref.rollout.agent.num_workers=1 \
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64 \
    reward.num_workers=1 reward.custom_reward_function.path="$HERE/task.py" \
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
    trainer.total_epochs=10 trainer.total_training_steps="$GRPO_STEPS" trainer.save_freq="$GRPO_STEPS" \
    trainer.val_before_train=false trainer.test_freq=-1 trainer.resume_mode=disable \
    trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.device=$DEVICE \
    trainer.logger='[console,file]' trainer.project_name=quickstart trainer.experiment_name=grpo \
    trainer.default_local_dir="$OUT/grpo" \
    +ray_kwargs.ray_init.address=local +ray_kwargs.ray_init.include_dashboard=false +ray_kwargs.ray_init.object_store_memory=500000000 \
    "${ROLLOUT_SETTINGS[@]}"
}

case $ROLLOUT in embedded | vllm) ;; *) fail "ROLLOUT=$ROLLOUT: must be embedded or vllm" ;; esac
command -v "${CXX:-c++}" > /dev/null || command -v g++ > /dev/null || fail "needs a C++ compiler; install g++ or set CXX"
mkdir -p "$OUT"
install
# What an earlier run left; nothing else that may lie in the folder
(cd "$OUT" && rm -rf data sft grpo checkpoint && rm -f ./*.jsonl before.json after.json reward.png build.log sft.log grpo.log evaluate.log)
SECONDS=0

case $ROLLOUT in
  embedded)
    # A CPU run even where there is a GPU. CUDA_VISIBLE_DEVICES must not be empty: Ray would refuse the logical GPU.
    unset CUDA_VISIBLE_DEVICES
    export VERL_PLATFORM=cpu
    DEVICE=cpu DTYPE=float32
    ROLLOUT_SETTINGS=(ray_kwargs.ray_init.num_cpus=8 +ray_kwargs.ray_init.num_gpus=1)
    ;;
  vllm)
    DEVICE=cuda DTYPE=bfloat16
    : "${HIDDEN:=128}"
    ROLLOUT_SETTINGS=(actor_rollout_ref.actor.megatrain.gpu_budget_gb=4 actor_rollout_ref.actor.megatrain.card_gb=24
      +actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=uni actor_rollout_ref.rollout.max_model_len=128)
    ;;
esac
unset RAY_ADDRESS
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
export RAY_DEDUP_LOGS=0 TQ_NUM_THREADS=2

logged "building model and data" "$OUT/build.log" "$RUN_PYTHON" "$HERE/build.py" "$OUT/data" "$SEED" "${HIDDEN:-96}"
tail -n 1 "$OUT/build.log"
warm_up
SFT_CHECKPOINT=$OUT/sft/global_step_$SFT_STEPS/huggingface
evaluate "$SFT_CHECKPOINT" "$OUT/before.json"
grpo
cp -r "$OUT/grpo/global_step_$GRPO_STEPS/actor/huggingface" "$OUT/checkpoint"
evaluate "$OUT/checkpoint" "$OUT/after.json"
echo "done in $SECONDS s; checkpoint: $OUT/checkpoint"
"$RUN_PYTHON" "$HERE/report.py" "$OUT/before.json" "$OUT/after.json" "$OUT/grpo.jsonl" "$OUT/reward.png"
