#!/usr/bin/env bash
# The records of GRPO with vLLM: the 7 B recipe with random weights, on one GPU told that it has 80 GB, beside 128 GiB
# of host memory, and learning with a small model.
#   bash recipes/measure_grpo_h200.sh [prepare] [8x2] [8x2-fp8] [32x8] [learning] [1024-seqs]     all without arguments
#
#   8x2       8 prompts x 2 answers, 512 + 1024 tokens, KL term with reference, moments in bf16; begins
#             grpo_7b_h200.json
#   8x2-fp8   the same with vLLM in FP8; has a record of its own
#   32x8      without a KL term, moments in fp32, temperature 0.7; goes on with the record of 8x2 (of the same commit
#             and machine)
#   learning  has a record of its own
#   1024-seqs 1,024 answers at a time of a model of 0.5 B with a vocabulary of 152 k, on the whole card: what the engine
#             takes beyond its share; has a record of its own
# Answers of random weights are noise, so their rewards are arbitrary numbers: equal ones would make every gradient
# zero.
#
#   OVERRIDES  more Hydra overrides, for a machine that is not the one described, say a larger host
#   WORK       model, data, outputs (outputs/measure)
#   RECORDS    where the records go (recipes/records)
#   PYTHON     as in the recipes
set -euo pipefail
cd "$(dirname "$0")/.."
work=${WORK:-outputs/measure}
records=${RECORDS:-recipes/records}
export PYTHON=${PYTHON:-python3}
mkdir -p "$work"

prepare() {
    [ -d "$work/model" ] || "$PYTHON" examples/make_random_model.py qwen2.5-7b "$work/model"
    # 426 letters are, with instruction and chat format, 512 tokens of a byte-level tokenizer
    "$PYTHON" - "$work/questions.jsonl" << 'EOF'
import json, random, sys
rng = random.Random(0)
with open(sys.argv[1], "w") as file:
    for i in range(1024):
        file.write(json.dumps({"question": "".join(rng.choices("abcdefghij ", k=426)), "answer": f"#### {i}"}) + "\n")
EOF
    "$PYTHON" examples/prepare_gsm8k.py "$work/data" --train "$work/questions.jsonl" --test "$work/questions.jsonl"
}

# run CASE RECORD PROMPTS ANSWERS STEPS UNCOUNTED OVERRIDES...
# RECORD: NAME, or +NAME to go on with it. The first UNCOUNTED steps are not in the figures.
run() {
    local case=$1 record=$2 prompts=$3 answers=$4 steps=$5 uncounted=$6 out=$work/$1
    shift 6
    local overrides=()
    read -r -a overrides <<< "${OVERRIDES:-}"
    local command="${OVERRIDES:+OVERRIDES='$OVERRIDES' }bash recipes/measure_grpo_h200.sh $case"
    local to=(--json "$records/${record#+}.json" --command "$command")
    [ "${record#+}" = "$record" ] || to+=(--append)
    "$PYTHON" recipes/grpo_record.py "$out" "$case" "${to[@]}" --check
    rm -rf "$out"
    MODEL_PATH=$(cd "${model:-$work/model}" && pwd) TRAIN_FILE=$work/data/train.parquet VAL_FILE=$work/data/test.parquet OUTPUT_DIR=$out \
        bash recipes/run_qwen2_5_7b_grpo.sh data.train_batch_size="$prompts" \
        actor_rollout_ref.actor.ppo_mini_batch_size="$prompts" actor_rollout_ref.rollout.n="$answers" \
        actor_rollout_ref.rollout.ignore_eos=true actor_rollout_ref.actor.megatrain.card_gb="${card_gb:-80}" \
        reward.custom_reward_function.path=recipes/arbitrary_reward.py \
        trainer.total_training_steps="$steps" trainer.save_freq=-1 trainer.test_freq=-1 trainer.resume_mode=disable "$@" "${overrides[@]}"
    "$PYTHON" recipes/grpo_record.py "$out" "$case" "${to[@]}" --skip "$uncounted"
}

with_kl=(actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.megatrain.optimizer_state_dtype=bfloat16)

8x2() { run 8x2 grpo_7b_h200 8 2 7 2 "${with_kl[@]}"; }

8x2-fp8() {
    run 8x2-fp8 grpo_7b_fp8_h200 8 2 5 2 "${with_kl[@]}" actor_rollout_ref.rollout.quantization=fp8 algorithm.rollout_correction.rollout_is=token
}

# host_reserve_gb: the state takes 107 of the host's 135 GB here; what is not reserved is filled with layer inputs
32x8() { run 32x8 +grpo_7b_h200 32 8 4 1 actor_rollout_ref.actor.megatrain.host_reserve_gb=16 actor_rollout_ref.rollout.temperature=0.7; }

learning() {
    local out=$work/learning
    local to=(--json "$records/learning_vllm_h200.json" --command "ROLLOUT=vllm bash recipes/quickstart.sh")
    "$PYTHON" recipes/learning_record.py "$out" small "${to[@]}" --check
    ROLLOUT=vllm QUICKSTART_OUT=$out bash recipes/quickstart.sh
    "$PYTHON" recipes/learning_record.py "$out" small "${to[@]}"
}

1024-seqs() {
    local model=$work/model-0.5b card_gb=null
    [ -d "$model" ] || "$PYTHON" examples/make_random_model.py qwen2.5-0.5b "$model"
    run 1024-seqs reserve_h200 128 8 3 0 actor_rollout_ref.rollout.max_num_seqs=1024 data.max_response_length=128
}

for what in "${@:-prepare 8x2 8x2-fp8 32x8 learning 1024-seqs}"; do
    for name in $what; do "$name"; done
done
