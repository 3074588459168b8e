"""recipes/grpo_record.py: medians of steady steps, peaks of the whole run, and runs too short for either."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "recipes" / "grpo_record.py"


def write_run(folder: Path, seconds: list[float]) -> None:
    (folder / "megatrain").mkdir(parents=True)
    entries = [
        {"step": i, "data": {"timing_s/step": s, "timing_s/gen": s / 2, "perf/throughput": 1000 / s}}
        for i, s in enumerate(seconds, start=1)
    ]
    (folder / "metrics.jsonl").write_text(
        "\n".join(json.dumps(e) for e in [*entries, {"step": 9, "data": {"val/reward": 1}}])
    )
    memory = {"time": [0.0, 1.0], "trainer_gpu_gib": [[7.0, 8.0], [1.0, 8.25]], "both_gpu_gib": [None, [60.0, 71.5]]}
    start = {"start": 0.0, "startup_s": {"Ray": 60.0, "rollout engine": 90.5}}
    lines = [start, {"step": 1, "time": 0.0, "stages_s": {}, "metrics": {}, "memory": memory}]
    (folder / "megatrain" / "run.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def collect(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, folder, "8x2", "--command", "bash recipes/x.sh", "--json", folder / "r.json", *arguments],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_medians_and_peaks(tmp_path):
    write_run(tmp_path, [100.0, 50.0, 10.0, 12.0, 11.0])
    done = collect(tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    figures = {r["metric"]: (r["value"], r["unit"]) for r in record["results"]}
    assert figures["step_s"] == (11.0, "s") and figures["generate_s"] == (5.5, "s")
    assert figures["tokens_per_s"] == (pytest.approx(1000 / 11, rel=1e-3), "1/s")
    assert figures["trainer_process_peak_gib"] == (8.25, "GiB") and figures["both_processes_peak_gib"] == (71.5, "GiB")
    assert figures["startup_s"] == (150.5, "s")
    assert "8x2 start-up: Ray 60.0 s, rollout engine 90.5 s" in record["raw"]
    assert record["command"] == "bash recipes/x.sh" and {r["case"] for r in record["results"]} == {"8x2"}
    assert [line.startswith(("8x2 step 1 (not counted)", "8x2 step 2 (not counted)")) for line in record["raw"][:3]] == [
        True, True, False,
    ]  # fmt: skip


def test_how_the_engine_kept_to_its_part_of_the_gpu(tmp_path):
    write_run(tmp_path, [9.0] * 5)
    file = tmp_path / "megatrain" / "run.jsonl"
    start, line = map(json.loads, file.read_text().splitlines())
    start["engine"] = {"share_gb": 60.0, "beyond_gb": 2 * 2**30 / 1e9}
    free = ([[3.0, 4.0], [2.5, 2.5]], [None, [3.5, 3.5]])
    lines = [
        line
        | {
            "metrics": {"megatrain/engine_beyond_share_gib": beyond},
            "memory": {"time": [0, 1], "device_free_gib": lows},
        }
        for beyond, lows in zip((0.5, 1.25), free, strict=True)
    ]
    file.write_text("\n".join(map(json.dumps, [start, *lines, line])))
    assert collect(tmp_path).returncode == 0
    figures = {r["metric"]: r["value"] for r in json.loads((tmp_path / "r.json").read_text())["results"]}
    assert (figures["beyond_share_gib"], figures["planned_gib"], figures["device_free_gib"]) == (1.25, 2.0, 2.5)


def add(folder: Path, steps: dict[int, dict[str, float]]) -> None:
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["data"] |= steps.get(line["step"], {})
    file.write_text("\n".join(map(json.dumps, lines)))


def sync(stage: float, waited_before: float) -> dict[str, float]:
    return {"timing_s/update_weights": stage, "megatrain/weight_sync_wait_s": waited_before}


def test_the_wait_for_the_optimizer_is_not_the_weight_sync(tmp_path):
    """It is logged with the next step, so the last step's sync is not counted."""
    write_run(tmp_path, [9.0] * 5)
    add(tmp_path, {1: sync(5.0, 0), 2: sync(1.5, 4.0), 3: sync(1.75, 1.0), 4: sync(2.0, 1.25), 5: sync(9.0, 1.5)})
    assert collect(tmp_path).returncode == 0
    figures = {r["metric"]: r["value"] for r in json.loads((tmp_path / "r.json").read_text())["results"]}
    assert figures["update_weights_s"] == 2.0
    assert figures["weight_sync_s"] == 0.5, "of 1.75 - 1.25 and 2.0 - 1.5"


def test_the_wait_of_a_resumed_runs_first_sync_is_not_that_of_the_step_before(tmp_path):
    write_run(tmp_path, [9.0] * 5)
    add(tmp_path, {3: sync(1.5, 0), 4: sync(1.5, 1.0), 5: sync(1.75, 1.0)})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.20260101T000000.jsonl")
    later = [{"step": i, "data": {"timing_s/step": 9.0} | sync(1.5, 0.5)} for i in (6, 7)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, later)))
    assert collect(tmp_path).returncode == 0
    raw = json.loads((tmp_path / "r.json").read_text())["raw"]
    told = [line.split("weight_sync_s ")[1].split(",")[0] if "weight_sync_s" in line else None for line in raw[:7]]
    assert told == [None, None, "0.5", "0.5", None, "1", None]


def test_metrics_of_the_run_before_a_resume_count(tmp_path):
    write_run(tmp_path, [9.0, 9.0, 5.0])
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.20260101T000000.jsonl")
    later = [{"step": i, "data": {"timing_s/step": s}} for i, s in ((3, 6.0), (4, 8.0), (5, 10.0))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, later)))
    assert collect(tmp_path).returncode == 0
    figures = {r["metric"]: r["value"] for r in json.loads((tmp_path / "r.json").read_text())["results"]}
    assert figures["step_s"] == 8.0, "step 3 was done again"


def test_check_before_a_run(tmp_path):
    assert collect(tmp_path, "--check").returncode == 0 and not (tmp_path / "r.json").exists()
    (tmp_path / "r.json").write_text(json.dumps({"commit": "another", "hardware": {}, "versions": {}}))
    done = collect(tmp_path, "--check", "--append")
    assert done.returncode == 1 and "another commit" in done.stderr


def test_a_run_that_is_too_short(tmp_path):
    write_run(tmp_path, [3.0, 2.0, 1.0, 1.0])
    done = collect(tmp_path)
    assert done.returncode == 1 and "4 steps" in done.stderr and "--skip 2 " in done.stderr
    assert not (tmp_path / "r.json").exists()


def test_a_folder_without_a_run(tmp_path):
    done = collect(tmp_path)
    assert done.returncode == 1 and "metrics.jsonl" in done.stderr and "Traceback" not in done.stderr
