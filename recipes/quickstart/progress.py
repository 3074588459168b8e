"""Runs one stage of the quickstart: its output goes to a log, its progress to a bar, its failure to one line.

usage: progress.py NAME STEPS LOG METRICS.jsonl -- command...

METRICS.jsonl is what VERL's `file` logger writes (VERL_FILE_LOGGER_PATH is set for the command). The exit status is
the command's. Without a terminal a line is printed every few steps instead of the bar.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

POLL_SECONDS = 0.5
# What a stage gets to end by itself before it is killed
STOP_SECONDS = 10
LINE_EVERY = 10

# What the bar shows, under which of VERL's names it is logged (SFT or RL), and how it is written.
SHOWN = (
    ("loss", ("train/loss",), "{:.3f}"),
    ("reward", ("critic/score/mean",), "{:.3f}"),
    ("kl", ("actor/kl_loss", "kl_loss"), "{:.3f}"),
    ("grad", ("actor/grad_norm", "train/grad_norm"), "{:.2f}"),
    ("tok/s", ("perf/throughput", "tokens_per_s"), "{:.0f}"),
)


class MetricsFile:
    """The complete records that VERL has appended since the last look."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0
        self._started: float | None = None
        self._tokens = 0

    def new_records(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = [json.loads(line) for line in whole.splitlines()]
        self._add_sft_speed(records)
        return records

    def _add_sft_speed(self, records: list[dict[str, Any]]) -> None:
        """VERL's SFT trainer logs tokens but no time: take the mean since its first record, by our own clock."""
        now = time.monotonic()
        for record in records:
            tokens = record["data"].get("train/global_tokens", 0)
            if self._started is None:
                self._started = now
            elif tokens:
                self._tokens += tokens
                record["data"]["tokens_per_s"] = self._tokens / max(now - self._started, POLL_SECONDS)


def describe(data: dict[str, Any]) -> str:
    parts = []
    for label, names, pattern in SHOWN:
        values = [data[name] for name in names if name in data]
        if values:
            parts.append(f"{label} {pattern.format(values[0])}")
    return "  ".join(parts)


def show(bar: tqdm, records: list[dict[str, Any]], name: str, steps: int) -> None:
    for record in records:
        text = describe(record["data"])
        if not text:
            continue  # a validation record
        step = record["step"]
        bar.set_description_str(name, refresh=False)
        bar.set_postfix_str(text, refresh=False)
        bar.update(step - bar.n)
        if bar.disable and (step == 1 or step % LINE_EVERY == 0 or step == steps):
            print(f"  {name} {step}/{steps}  {text}", flush=True)


def run(name: str, steps: int, log: Path, metrics: Path, command: list[str]) -> int:
    metrics.unlink(missing_ok=True)
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)}
    with log.open("wb") as output:
        # A group of its own, so that an interrupt can be passed on to everything it started.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    reader = MetricsFile(metrics)
    bar = tqdm(total=steps, desc=f"{name} (starting, log: {log})", disable=None, dynamic_ncols=True)
    try:
        while process.poll() is None:
            show(bar, reader.new_records(), name, steps)
            bar.refresh()
            time.sleep(POLL_SECONDS)
        show(bar, reader.new_records(), name, steps)
    finally:
        bar.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode


def interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    for signum in (signal.SIGTERM, signal.SIGHUP):  # a time-out or a closed terminal must stop the stage too
        signal.signal(signum, interrupt)
    split = sys.argv.index("--")
    name, steps, log, metrics = sys.argv[1:split]
    try:
        code = run(name, int(steps), Path(log), Path(metrics), sys.argv[split + 1 :])
    except KeyboardInterrupt:
        sys.exit(f"quickstart: {name} interrupted; log: {log}")
    if code != 0:
        print(f"quickstart: {name} failed (exit status {code}); see {log}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
