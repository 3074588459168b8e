"""`megatrain-rl bench peers`: the same training step by other engines and by this package.

The others are DeepSpeed ZeRO-3 offload, FSDP2 offload and the reference implementation's schedule. Shape, sequences,
objective, attention kernel, head and machine are the same.

Each engine runs in a process of its own within a time limit. One that fails is reported with its last lines, has no
figures, and makes the command end with an error after everything else is written. The figures of an engine are reported
when it ends, so a command that is interrupted leaves a record of the engines before.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field

from megatrain_rl.bench.arguments import (
    Case,
    add_cases,
    add_common,
    add_model,
    add_settings,
    check_settle,
    read_cases,
    read_config,
    run_device,
)
from megatrain_rl.bench.ceilings import measure_ceilings
from megatrain_rl.bench.data import random_lengths
from megatrain_rl.bench.flops import useful_flops
from megatrain_rl.bench.peers.worker import ENGINES, PREFIX
from megatrain_rl.bench.record import Record
from megatrain_rl.bench.shapes import shape_config
from megatrain_rl.model.decoder import decoder_spec

OURS = "stream"
_RATIOS = {"zero3": "vs_zero3_offload", "fsdp2": "vs_fsdp2_offload", "reference": "vs_reference_schedule"}
_LAST_LINES = 25
_GRACE_SECONDS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, shape="qwen2.5-3b")
    add_cases(parser, steps=3, warmup=1)
    parser.add_argument(
        "--settle",
        type=int,
        default=4,
        help="steps of the first case before all others, in every engine; this package's host optimizer needs them (see bench step)",
    )
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only these; default all")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192, help="of ZeRO-3 and FSDP2")
    parser.add_argument("--reference-micro-batch-tokens", type=int, default=4096, help="of the reference schedule")
    parser.add_argument(
        "--time-limit", type=float, default=240.0, help="seconds an engine may take, all cases together"
    )
    add_settings(parser)
    add_common(parser)


def run(arguments: argparse.Namespace, record: Record) -> None:
    cases = read_cases(arguments, default=["3b-16k=16384", "3b-64k=65536"])
    read_config(arguments.set)  # a wrong setting is this process's error, not a worker's
    spec = decoder_spec(shape_config(arguments.shape, layers=arguments.layers))
    for name in ("micro_batch_tokens", "reference_micro_batch_tokens", "time_limit"):
        if vars(arguments)[name] <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {vars(arguments)[name]}: must be positive")
    check_settle(arguments)
    ceilings = measure_ceilings(run_device(), record, quick=arguments.quick)
    outcomes: dict[str, Outcome] = {}
    for engine in arguments.engine or ENGINES:
        record.say(f"== {engine}")
        outcomes[engine] = run_worker(worker_command(engine, cases, arguments), arguments.time_limit)
        missing = [case.name for case in cases if case.name not in outcomes[engine].cases]
        if missing and not outcomes[engine].error:
            outcomes[engine].error = f"ended without figures of {', '.join(missing)}"
        for line in outcomes[engine].lines():
            record.say(line)
        for case in cases:
            _report(case, engine, outcomes, record)
            speed = outcomes[engine].speed(case)
            if engine == OURS and speed is not None:
                lengths = random_lengths(case.tokens, arguments.mean_length, seed=arguments.seed)
                rate = useful_flops(spec, lengths, train=True) / case.tokens * speed
                record.result(case.name, "matmul_fraction", rate / (ceilings.matmul_tflops * 1e12), "")
    failed = [engine for engine, outcome in outcomes.items() if outcome.error]
    if failed:
        raise ValueError(f"no complete figures of {', '.join(failed)}: their last lines are above and in the record")


@dataclass(kw_only=True)
class Outcome:
    """All that is known of one engine. settings: how it was set up. settling: a line for each settling step. cases:
    figures by case. error, last_lines: what went wrong, if anything did, and what the engine printed last."""

    settings: str = ""
    settling: list[str] = field(default_factory=list)
    cases: dict[str, dict] = field(default_factory=dict)
    error: str = ""
    last_lines: list[str] = field(default_factory=list)

    def speed(self, case: Case) -> float | None:
        """Tokens a second, or None if the case was not measured."""
        return self.cases[case.name]["tokens_per_s"] if case.name in self.cases else None

    def lines(self) -> list[str]:
        said = ([self.settings] if self.settings else []) + self.settling
        for name, figures in self.cases.items():
            said += [f"{name} {line}" for line in figures["lines"]]
        return said + ([f"FAILED: {self.error}", *self.last_lines] if self.error else [])


def worker_command(engine: str, cases: list[Case], arguments: argparse.Namespace) -> list[str]:
    reference = engine == "reference"
    micro = arguments.reference_micro_batch_tokens if reference else arguments.micro_batch_tokens
    command = [
        sys.executable, "-m", "megatrain_rl.bench.peers.worker", "--engine", engine, "--shape", arguments.shape,
        "--mean-length", str(arguments.mean_length), "--steps", str(arguments.steps), "--warmup", str(arguments.warmup),
        "--settle", str(arguments.settle),
        "--seed", str(arguments.seed), "--micro-batch-tokens", str(micro),
    ]  # fmt: skip
    command += [] if arguments.layers is None else ["--layers", str(arguments.layers)]
    command += [word for case in cases for word in ("--case", f"{case.name}={case.tokens}")]
    return command + [word for item in arguments.set for word in ("--set", item)]


def run_worker(command: list[str], time_limit: float) -> Outcome:
    """Run one worker to its end or to the limit (seconds). It and whatever it started are gone afterwards, also when
    this is interrupted."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    assert process.stdout is not None
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        kill()

    def kill() -> None:
        # asked first: one that is killed while it compiles leaves a lock in the compiler's cache, and all later ones
        # wait for that
        for signum in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signum)
                process.wait(_GRACE_SECONDS)

    alarm = threading.Timer(time_limit, stop)
    alarm.start()
    outcome = Outcome()
    try:
        for line in process.stdout:
            _take(line.rstrip(), outcome)
        code = process.wait()
    finally:
        alarm.cancel()
        kill()
    if timed_out.is_set():
        outcome.error = f"stopped after the limit of {time_limit:g} s"
    elif code != 0:
        outcome.error = f"exit status {code}"
    return outcome


def _take(line: str, outcome: Outcome) -> None:
    # what others print without ending their line stands before or behind it
    before, _, text = line.partition(PREFIX)
    try:
        content, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError:
        content, before, end = {}, line, len(text)
    outcome.last_lines = [*outcome.last_lines, *filter(None, (before, text[end:]))][-_LAST_LINES:]
    if "settings" in content:
        outcome.settings = content["settings"]
    elif "settle" in content:
        outcome.settling.append(content["settle"])
    elif "case" in content:
        outcome.cases[content["case"]] = content


def _report(case: Case, engine: str, outcomes: dict[str, Outcome], record: Record) -> None:
    """Put the figures of the engine that has just ended into the record, and the ratios that they complete."""
    own = outcomes[engine].cases.get(case.name)
    if own is None:
        return
    prefix = "" if engine == OURS else f"{engine}_"
    record.result(case.name, f"{prefix}tokens_per_s", own["tokens_per_s"], "1/s")
    record.result(case.name, f"{prefix}peak_gib", own["peak_gib"], "GiB")
    record.result(case.name, f"{prefix}host_rss_gib", own["host_rss_gib"], "GiB")
    ours = outcomes[OURS].speed(case) if OURS in outcomes else None
    for peer in _RATIOS if engine == OURS else (engine,):
        theirs = outcomes[peer].speed(case) if peer in outcomes else None
        if ours is not None and theirs is not None:
            record.result(case.name, _RATIOS[peer], ours / theirs, "")
