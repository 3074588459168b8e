"""The record of a GRPO run: medians of its steady steps, peaks of the whole run.

    python recipes/grpo_record.py OUTPUT_DIR CASE --command "bash recipes/..." \\
        --json recipes/records/NAME.json [--append]

Reads what a run_*.sh recipe leaves in OUTPUT_DIR: metrics.jsonl (VERL's metrics) and megatrain/run.jsonl (memory). The
first steps (--skip 2), in which things compile, are shown but not counted.

VERL's stage `update_weights` is two things: waiting, layer by layer, for the host optimizer, and handing the weights
over. weight_sync_s is the stage without that wait. The wait of a step is logged with the next one. optimizer_wait_s is
all waiting since the last report.

beyond_share_gib is the most that the rollout engine's process held, less the share that it was given; planned_gib is
what the division of the GPU had for that; device_free_gib is the least of the card that was free.
"""

import json
import statistics
from pathlib import Path

import run_record

from megatrain_rl.bench.record import Record
from megatrain_rl.watch import report

_SYNC = "update_weights without the wait"
# metric of the record: VERL's or the monitor's name, unit
METRICS = {
    "step_s": ("timing_s/step", "s"),
    "generate_s": ("timing_s/gen", "s"),
    "old_log_prob_s": ("timing_s/old_log_prob", "s"),
    "reference_s": ("timing_s/ref", "s"),
    "update_s": ("timing_s/update_actor", "s"),
    "update_weights_s": ("timing_s/update_weights", "s"),
    "optimizer_wait_s": (report.OPTIMIZER_WAIT, "s"),
    "weight_sync_s": (_SYNC, "s"),
    "tokens_per_s": ("perf/throughput", "1/s"),
    "prob_gap_mean": ("training/rollout_probs_diff_mean", ""),
    "on_policy_kl": ("actor/ppo_kl", "nat"),  # of the update's log-probs to the old ones: 0 where the ratio is 1
    "log_prob_gap_mean": ("megatrain/rollout_log_prob_gap_mean", "nat"),
}
PEAKS = {
    "trainer_process_peak_gib": "trainer_gpu_gib",
    "engine_process_peak_gib": "engine_gpu_gib",
    "both_processes_peak_gib": "both_gpu_gib",
    "host_rss_gib": "run_rss_gib",
}


def read_steps(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics by step."""
    steps: dict[int, dict[str, float]] = {}
    # a run that was resumed has several files: metrics.TIME.jsonl, then metrics.jsonl
    for file in [*sorted(folder.glob("metrics.*.jsonl")), folder / "metrics.jsonl"]:
        run: dict[int, dict[str, float]] = {}
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            run.setdefault(entry["step"], {}).update(entry["data"])
        for step, data in run.items():
            waited = run.get(step + 1, {}).get(report.SYNC_WAIT)
            if waited is not None and "timing_s/update_weights" in data:
                data[_SYNC] = data["timing_s/update_weights"] - waited
        steps |= run
    return {step: data for step, data in sorted(steps.items()) if "timing_s/step" in data}


def division_gib(folder: Path, lines: list[dict]) -> dict[str, float]:
    """How the engine kept to its part of the GPU; empty where the run did not divide one."""
    engine = report.engine_share(folder)
    beyond = [line["metrics"][report.BEYOND_SHARE] for line in lines if report.BEYOND_SHARE in line["metrics"]]
    if engine is None or not beyond:
        return {}
    lows = [pair[0] for line in lines for pair in line["memory"].get("device_free_gib", []) if pair]
    return {
        "beyond_share_gib": max(beyond),
        "planned_gib": engine.beyond_gb * 1e9 / report.GIB,
        "device_free_gib": min(lows),
    }


def peak_gib(lines: list[dict], column: str) -> float | None:
    highs = [pair[1] for line in lines for pair in line["memory"].get(column, []) if pair]
    return max(highs, default=None)


def fill(record: Record, case: str, folder: Path, skip: int) -> None:
    steps = read_steps(folder)
    steady = list(steps.values())[skip:]
    if len(steady) < 3:
        raise ValueError(
            f"{folder}: {len(steps)} steps, of which --skip {skip} leaves {len(steady)}; at least 3 are needed"
        )
    for number, data in steps.items():
        shown = ", ".join(f"{name} {data[key]:.4g}" for name, (key, _) in METRICS.items() if key in data)
        record.say(f"{case} step {number}{' (not counted)' if number <= min(steps) + skip - 1 else ''}: {shown}")
    for name, (key, unit) in METRICS.items():
        values = [data[key] for data in steady if key in data]
        if values:
            record.result(case, name, statistics.median(values), unit)
    phases = report.startup_s(folder / "megatrain")
    if phases:
        record.say(f"{case} start-up: " + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases.items()))
        record.result(case, "startup_s", sum(phases.values()), "s")
    lines = report.read(folder / "megatrain")
    for name, column in PEAKS.items():
        peak = peak_gib(lines, column)
        if peak is not None:
            record.result(case, name, peak, "GiB")
    for name, value in division_gib(folder / "megatrain", lines).items():
        record.result(case, name, value, "GiB")


def main() -> None:
    parser = run_record.parser(__doc__)
    parser.add_argument("--skip", type=int, default=2)
    arguments = parser.parse_args()
    run_record.write(arguments, lambda record: fill(record, arguments.case, arguments.folder, arguments.skip))


if __name__ == "__main__":
    main()
