"""The record of a quickstart run: held-out reward before and after, and the curve between.

python recipes/learning_record.py outputs/quickstart/seed-1 small --command "bash recipes/..." --json recipes/records/NAME.json
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from megatrain_rl.bench.record import Record, check_writable


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("case")
    parser.add_argument("--command", required=True, help="what was run")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--check", action="store_true", help="only whether the record could be written, before the run")
    arguments = parser.parse_args()
    record = Record([], command=arguments.command)
    try:
        check_writable(arguments.json, "--json")
        if arguments.check:
            return
        fill(record, arguments.case, arguments.folder)
    except (OSError, ValueError) as error:
        sys.exit(f"learning_record: {error}")
    record.write(arguments.json)


if __name__ == "__main__":
    main()
