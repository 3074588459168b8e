#!/usr/bin/env bash
# The records of the training pipeline, on one GPU with 128 GiB of host memory beside it (an H200 in recipes/records).
#   bash recipes/measure_h200.sh [step] [adam] [peers]     all three without arguments
#   RECORDS  where they go (recipes/records)
#   PYTHON   the interpreter, with this package and its `bench` and `deepspeed` extras (python3)
set -euo pipefail
cd "$(dirname "$0")/.."
records=${RECORDS:-recipes/records}
bench() { "${PYTHON:-python3}" -m megatrain_rl.cli bench "$@"; }

step() {
    local record=$records/step_h200.json
    rm -f "$record"
    bench step --shape qwen2.5-7b --case 7b-16k=16384 --case 7b-131k=131072 --case 7b-32k=32768 --steps 3 --warmup 2 \
        --trace "$records/step_h200_trace.json.gz" --trace-picture "$records/step_h200_trace.png" --json "$record"
    bench step --shape qwen2.5-7b --case 7b-32k-6gb=32768 --steps 3 --settle 4 --set gpu_budget_gb=6 --json "$record" --append
    # as many layers as 128 GiB hold beside 65k tokens of layer inputs
    bench step --shape qwen2.5-14b --layers 22 --case 14b-65k=65536 --steps 3 --settle 3 --warmup 1 --json "$record" --append
    bench step --shape qwen3-32b --layers 13 --case 32b-65k=65536 --steps 3 --settle 3 --warmup 1 --json "$record" --append
    bench logprob --shape qwen2.5-7b --case 7b-logprob-32k=32768 --steps 5 --json "$record" --append
}

adam() { bench adam --json "$records/adam_h200.json"; }

peers() { bench peers --steps 3 --warmup 1 --json "$records/peers_h200.json"; }

for what in "${@:-step adam peers}"; do
    for name in $what; do "$name"; done
done
