# shellcheck shell=bash
# Inputs, checks and overrides that the run_*.sh recipes share; sourced by them.
#
#   MODEL_PATH   a folder with config.json, or a hub name (organisation/model)
#   TRAIN_FILE   parquet, as examples/prepare_gsm8k.py writes it (data/gsm8k/train.parquet)
#   VAL_FILE     likewise (data/gsm8k/test.parquet)
#   LOGGER       VERL's loggers with commas between them: console, wandb, tensorboard, ... (console)
#   OUTPUT_DIR   checkpoints, metrics.jsonl, pictures (outputs/NAME). A second run goes on from the last checkpoint
#                there
#   PYTHON       the interpreter that has this package, VERL and vLLM (python3)
# Everything else is a Hydra override behind the recipe's name; it wins over what stands here.

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

check_inputs() {
  if [ ! -f "$MODEL_PATH/config.json" ]; then
    case $MODEL_PATH in
      /* | ./* | ../* | ~*) fail "no model at $MODEL_PATH; set MODEL_PATH to a folder with config.json or to a hub name" ;;
      */*/* | '') fail "MODEL_PATH='$MODEL_PATH' is neither a folder with config.json nor a hub name (organisation/model)" ;;
    esac
    [ ! -e "$MODEL_PATH" ] || fail "no config.json in $MODEL_PATH; set MODEL_PATH to a folder with config.json or to a hub name"
  fi
  local setting
  for setting in TRAIN_FILE VAL_FILE; do
    [ -f "${!setting}" ] || fail "no file ${!setting}; make it with 'python examples/prepare_gsm8k.py data/gsm8k', or set $setting"
  done
  "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("megatrain_rl", "verl", "vllm"))))' 2> /dev/null \
    || fail "$PYTHON lacks megatrain_rl, verl or vllm; pip install '.[vllm]', or set PYTHON"
  if [ ! -f "$MODEL_PATH/config.json" ]; then
    "$PYTHON" -c 'import sys; from transformers import AutoConfig; AutoConfig.from_pretrained(sys.argv[1])' "$MODEL_PATH" > /dev/null 2>&1 \
      || fail "no model $MODEL_PATH, neither a folder here nor on the hub; set MODEL_PATH to a folder with config.json or to a hub name"
  fi
}

# grpo NAME DEFAULT_MODEL SETTINGS... -- USER'S OVERRIDES...
grpo() {
  local name=$1
  MODEL_PATH=${MODEL_PATH:-$2}
  shift 2
  TRAIN_FILE=${TRAIN_FILE:-data/gsm8k/train.parquet}
  VAL_FILE=${VAL_FILE:-data/gsm8k/test.parquet}
  PYTHON=${PYTHON:-python3}
  OUTPUT_DIR=${OUTPUT_DIR:-outputs/$name}
  check_inputs
  mkdir -p "$OUTPUT_DIR"
  local settings=()
  while [ "$1" != -- ]; do
    settings+=("$1")
    shift
  done
  shift
  local actor=actor_rollout_ref.actor rollout=actor_rollout_ref.rollout
  export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$OUTPUT_DIR/metrics.jsonl}
  # VERL begins the file anew; what an earlier run left, which this one may go on from, is kept beside it
  if [ -s "$VERL_FILE_LOGGER_PATH" ]; then
    mv "$VERL_FILE_LOGGER_PATH" "${VERL_FILE_LOGGER_PATH%.jsonl}.$(date +%Y%m%dT%H%M%S).jsonl"
  fi
  unset RAY_ADDRESS
  export TQ_NUM_THREADS=${TQ_NUM_THREADS:-2} TOKENIZERS_PARALLELISM=false
  # dataloader_num_workers: VERL's default is eight more processes, for a few prompts a step
  # distributed_executor_backend: vLLM's worker in its engine's process, so one process less to start and to keep in
  # host RAM
  exec "$PYTHON" -m verl.trainer.main_ppo model_engine=megatrain \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=false \
    data.train_files="$TRAIN_FILE" data.val_files="$VAL_FILE" \
    data.train_batch_size=32 $actor.ppo_mini_batch_size=32 $rollout.n=8 \
    data.max_prompt_length=512 data.max_response_length=1024 data.truncation=error data.filter_overlong_prompts=true \
    data.dataloader_num_workers=0 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    $actor.optim.lr=1e-6 $actor.use_dynamic_bsz=true $actor.ppo_max_token_len_per_gpu=16384 \
    $rollout.name=vllm $rollout.tensor_model_parallel_size=1 $rollout.n_gpus_per_node=1 $rollout.load_format=dummy \
    +$rollout.engine_kwargs.vllm.distributed_executor_backend=uni \
    $rollout.log_prob_use_dynamic_bsz=true $rollout.log_prob_max_token_len_per_gpu=16384 \
    $rollout.agent.num_workers=4 reward.num_workers=1 \
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=16384 \
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
    +ray_kwargs.ray_init.address=local +ray_kwargs.ray_init.include_dashboard=false +ray_kwargs.ray_init.object_store_memory=4000000000 \
    trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.val_before_train=false trainer.test_freq=20 \
    trainer.save_freq=20 trainer.max_actor_ckpt_to_keep=1 trainer.total_epochs=1 \
    trainer.logger="[file,${LOGGER:-console}]" trainer.project_name=megatrain_rl trainer.experiment_name="$name" \
    trainer.default_local_dir="$OUTPUT_DIR" \
    "${settings[@]}" "$@"
}
