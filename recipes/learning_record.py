"""The record of a quickstart run: held-out reward before and after, and the curve between.

python recipes/learning_record.py outputs/quickstart/seed-1 small --command "bash recipes/..." \\
    --json recipes/records/NAME.json
"""

import json
import statistics
from pathlib import Path

import run_record

from megatrain_rl.bench.record import Record


def fill(record: Record, case: str, folder: Path) -> None:
    before, after = (json.loads((folder / f"{name}.json").read_text()) for name in ("before", "after"))
    gaps = []
    for line in (folder / "grpo.jsonl").read_text().splitlines():
        entry = json.loads(line)
        data = entry["data"]
        if "critic/score/mean" in data:
            gap = data.get("training/rollout_probs_diff_mean")
            gaps += [] if gap is None else [gap]
            told = "" if gap is None else f", |p_rollout - p_trainer| {gap:.2g}"
            record.say(f"{case} step {entry['step']}: reward {data['critic/score/mean']:.3f}{told}")
    record.result(case, "held_out_before", before["reward"], "reward")
    record.result(case, "held_out_after", after["reward"], "reward")
    record.result(case, "reward_gain", after["reward"] - before["reward"], "reward")
    if gaps:
        record.result(case, "prob_gap_mean", statistics.fmean(gaps), "")


def main() -> None:
    arguments = run_record.parser(__doc__).parse_args()
    run_record.write(arguments, lambda record: fill(record, arguments.case, arguments.folder))


if __name__ == "__main__":
    main()
