"""recipes/learning_record.py: gain and curve of a quickstart run."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "recipes" / "learning_record.py"


def collect(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, folder, "small", "--command", "bash x.sh", "--json", folder / "r.json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_gain_and_curve(tmp_path):
    for name, reward in (("before", 0.3), ("after", 0.95)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"reward": reward}))
    lines = [
        {"step": i, "data": {"critic/score/mean": i / 4, "training/rollout_probs_diff_mean": i / 1000}}
        for i in (1, 2, 3)
    ]
    lines.append({"step": 3, "data": {"val/reward": 1.0}})
    (tmp_path / "grpo.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = collect(tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    figures = {r["metric"]: r["value"] for r in record["results"]}
    assert figures == {"held_out_before": 0.3, "held_out_after": 0.95, "reward_gain": 0.65, "prob_gap_mean": 0.002}
    assert record["raw"][1] == "small step 2: reward 0.500, |p_rollout - p_trainer| 0.002" and len(record["raw"]) == 3


def test_a_run_that_did_not_end(tmp_path):
    done = collect(tmp_path)
    assert done.returncode == 1 and "before.json" in done.stderr and "Traceback" not in done.stderr
