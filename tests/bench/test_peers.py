"""The other engines do the same step, and one that fails is reported and has no figures."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import oracle
import psutil
import pytest
import tiny
import torch
from listeners import beyond_loopback, watched
from transformers import AutoModelForCausalLM

from megatrain_rl.batch import pack_sequences
from megatrain_rl.bench.data import PolicyGradientSurrogate
from megatrain_rl.bench.peers import run as peers
from megatrain_rl.bench.peers.model import MicroBatch, PeerModel
from megatrain_rl.bench.peers.run import run_worker
from megatrain_rl.bench.peers.worker import PREFIX
from megatrain_rl.bench.peers.zero3 import BUILT_OPS, Zero3Engine
from megatrain_rl.ops import build_locks

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_peers_model_has_the_oracles_gradients(tied):
    """Packed, checkpointed and with a chunked head, it is still the model transformers computes."""
    config = tiny.config(layers=2, tied=tied)
    peer = PeerModel(config, dtype=torch.float32, device=CPU, seed=3)
    peer.decoder.gradient_checkpointing_enable()
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.model.load_state_dict(peer.decoder.state_dict())
    if not tied:
        plain.lm_head.weight.data.copy_(peer.lm_head.weight.data)
    sequences = tiny.sequences()
    packs = pack_sequences(sequences, max_tokens=48)
    surrogate = PolicyGradientSurrogate(packs, seed=1, std=1.0)
    losses = []
    for pack in packs:
        loss = peer(MicroBatch.of(pack, surrogate.coefficients(pack), CPU, torch.float32))
        loss.backward()
        losses.append(loss.item())
    stats = oracle.token_stats(plain, sequences, [1.0] * len(sequences))
    expected = torch.zeros(())
    for pack in packs:
        parts = surrogate.coefficients(pack).split(pack.cu_seqlens.diff().tolist())
        for row, coefficient in zip(pack.sequence_ids, parts, strict=True):
            expected = expected + (coefficient[:-1] * stats.log_probs[row]).sum()
    expected.backward()
    assert sum(losses) == pytest.approx(expected.item(), abs=1e-5)
    theirs = {name: p.grad for name, p in plain.model.named_parameters()}
    for name, parameter in peer.decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(peer.lm_head.weight.grad, plain.lm_head.weight.grad, rtol=1e-4, atol=1e-6)


def losses_and_norms(raw: list[str], engine: str) -> list[tuple[float, float]]:
    start = raw.index(f"== {engine}") + 1
    lines = [line for line in raw[start:] if "grad norm" in line or line.startswith("==")]
    own = lines[: next((i for i, line in enumerate(lines) if line.startswith("==")), len(lines))]
    return [
        (float(line.split("loss ")[1].split(",")[0]), float(line.split("grad norm ")[1].split()[0])) for line in own
    ]


def test_peers_run_and_agree(run_bench, monkeypatch):
    """Weights differ (each draws its own), data and loss do not: losses and norms are close in every step. The
    reference schedule is this package's own code and has its test in test_commands. None listens to the network."""
    pytest.importorskip("deepspeed")
    words = (
        "--shape",
        "tiny",
        "--layers",
        "1",
        "--mean-length",
        "20",
        "--steps",
        "3",
        "--warmup",
        "0",
        "--settle",
        "1",
        "--case",
        "a=70",
    )
    # the limit is for zero3 on a busy machine: it builds two ops of DeepSpeed first
    sizes = ("--micro-batch-tokens", "40", "--set", "pack_tokens=40", "--time-limit", "900")
    with watched() as (marked, listeners):
        for name, value in marked.items():
            monkeypatch.setenv(name, value)
        written = run_bench("peers", *words, *sizes, "--engine", "zero3", "--engine", "fsdp2", "--engine", "stream")
    assert beyond_loopback(listeners) == [] and listeners
    figures = written.figures("a")
    for engine in ("zero3_", "fsdp2_", ""):
        assert figures[f"{engine}tokens_per_s"] > 0 and figures[f"{engine}host_rss_gib"] > 0
    assert '"pin_memory":true' in next(line for line in written.raw if line.startswith("deepspeed"))
    ours = losses_and_norms(written.raw, "stream")
    assert len(ours) == 4, "one of them settling"
    for engine in ("zero3", "fsdp2"):
        for (loss, norm), (our_loss, our_norm) in zip(losses_and_norms(written.raw, engine), ours, strict=True):
            assert loss == pytest.approx(our_loss, abs=1.5e-3) and norm == pytest.approx(our_norm, rel=0.15)


def test_zero3_waits_for_the_lock_of_a_killed_build_within_limits(tmp_path, monkeypatch):
    """Without the limit this test would not end: the process group's op is built before the optimizer's."""
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(build_locks, "ABANDONED_SECONDS", 0.0)
    monkeypatch.setattr(build_locks, "_TOLD_AFTER_SECONDS", 0.0)
    for op in BUILT_OPS:
        lock = tmp_path / op / "lock"
        lock.parent.mkdir()
        lock.touch()
        with pytest.raises(ValueError, match="the engine zero3") as error:
            Zero3Engine(tiny.config(layers=1), CPU, micro_batch_tokens=8, seed=0)
        assert str(lock) in str(error.value)
        lock.unlink()


def test_no_negative_settling(run_bench):
    with pytest.raises(SystemExit, match="--settle -1"):
        run_bench("peers", "--shape", "tiny", "--settle", "-1")


def worker(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_figures_of_a_worker():
    code = f'print(\'noise\'); print(\'{PREFIX}\' + \'{{"settings": "s"}}\'); print(\'{PREFIX}\' + \'{{"case": "a", "lines": ["l"]}}\')'
    outcome = run_worker(worker(code), 30)
    assert outcome.error == "" and outcome.settings == "s" and list(outcome.cases) == ["a"]
    assert outcome.lines() == ["s", "a l"]


@pytest.mark.parametrize(
    "line, cases, last",
    [
        ("50%|{}", ["a"], ["50%|"]),
        ("{}Exception ignored", ["a"], ["Exception ignored"]),
        ("{}", ["a"], []),
        ("noise", [], ["noise"]),
        (PREFIX + '{"case": "a", "li', [], [PREFIX + '{"case": "a", "li']),
    ],
    ids=["behind", "before", "alone", "no figure", "torn"],
)
def test_figures_among_what_others_print(line, cases, last):
    """The worker's two outputs are one, and not everybody ends a line."""
    outcome = peers.Outcome()
    peers._take(line.replace("{}", PREFIX + '{"case": "a", "lines": []}'), outcome)
    assert list(outcome.cases) == cases and outcome.last_lines == last


def test_an_engine_that_ends_without_its_figures_has_failed(run_bench, pretended, monkeypatch, tmp_path):
    pretended({"zero3": 50.0, "fsdp2": 100.0, "reference": 25.0, "stream": 200.0})
    command = peers.worker_command
    monkeypatch.setattr(
        peers, "worker_command", lambda engine, *rest: worker("0") if engine == "fsdp2" else command(engine)
    )
    with pytest.raises(SystemExit, match="no complete figures of fsdp2"):
        run_bench(*WORDS)
    assert "FAILED: ended without figures of a" in json.loads((tmp_path / "record.json.partial").read_text())["raw"]


def test_a_crash_is_reported_with_its_last_lines_and_keeps_what_was_measured():
    code = (
        f"print('{PREFIX}' + '{{\"case\": \"a\", \"lines\": []}}', flush=True); print(*range(50), sep='\\n', flush=True); "
        "raise RuntimeError('out of memory')"
    )
    outcome = run_worker(worker(code), 30)
    assert outcome.error == "exit status 1" and list(outcome.cases) == ["a"]
    assert outcome.lines()[0] == "FAILED: exit status 1"
    assert "RuntimeError: out of memory" in outcome.lines()[-1] and "0" not in outcome.lines()


class WhenThereIs(threading.Thread):
    """In the place of a clock: the time is up when the file is there."""

    def __init__(self, file: Path, time_is_up: Callable[[], None]):
        super().__init__(daemon=True)
        self._file = file
        self._time_is_up = time_is_up
        self._cancelled = threading.Event()

    def run(self) -> None:
        while not self._file.exists():
            if self._cancelled.wait(0.02):
                return
        self._time_is_up()

    def cancel(self) -> None:
        self._cancelled.set()


limits_of_timers: list[float] = []  # of the fixture below


@pytest.fixture
def time_is_up(monkeypatch, tmp_path) -> Path:
    """The file by which a worker says that its time is up, whatever its limit."""
    file = tmp_path / "time is up"
    limits_of_timers.clear()

    def timer(limit, stop):
        limits_of_timers.append(limit)
        return WhenThereIs(file, stop)

    monkeypatch.setattr(threading, "Timer", timer)
    return file


def test_a_worker_over_its_time_is_stopped_with_its_children(time_is_up):
    """A child that went on would keep the worker's output open, and this test would not end."""
    child = f"import pathlib, time; pathlib.Path({str(time_is_up)!r}).touch(); time.sleep(3600)"
    code = f"import subprocess, sys; print('began', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    outcome = run_worker(worker(code), 2)
    assert outcome.error == "stopped after the limit of 2 s" and outcome.last_lines[0] == "began"
    assert limits_of_timers == [2]


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_worker_that_is_stopped_gives_back_what_it_locked(monkeypatch, tmp_path, time_is_up, stubborn):
    """So it does with torch's lock on a folder in which it compiles. One that does not listen is gone all the same."""
    monkeypatch.setattr(peers, "_GRACE_SECONDS", 1 if stubborn else 60)
    lock = tmp_path / "lock"
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN)" if stubborn else "0"
    code = f"""
import os, pathlib, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
{ignore}
lock = pathlib.Path({str(lock)!r})
lock.touch()
try:
    print(os.getpid(), flush=True)
    pathlib.Path({str(time_is_up)!r}).touch()
    time.sleep(3600)
finally:
    lock.unlink()
"""
    outcome = run_worker(worker(code), 1)
    assert outcome.error == "stopped after the limit of 1 s" and lock.exists() == stubborn
    assert limits_of_timers == [1]
    assert not psutil.pid_exists(int(outcome.last_lines[0]))


def test_an_interrupted_worker_is_gone(monkeypatch):
    code = f"import os, time; print({PREFIX!r} + str(os.getpid()), flush=True); time.sleep(3600)"
    seen = []

    def interrupted(line, outcome):
        seen.append(int(line.removeprefix(PREFIX)))
        raise KeyboardInterrupt

    monkeypatch.setattr(peers, "_take", interrupted)
    monkeypatch.setattr(peers, "_GRACE_SECONDS", 1)
    with pytest.raises(KeyboardInterrupt):
        run_worker(worker(code), 30)
    assert len(seen) == 1 and not psutil.pid_exists(seen[0])


@pytest.fixture
def pretended(monkeypatch):
    """Workers that only print figures, of so many tokens a second; None fails."""

    def install(speeds: dict[str, float | None]) -> None:
        def command(engine: str, *rest) -> list[str]:
            if speeds[engine] is None:
                return worker("raise SystemExit('broken')")
            figures: dict[str, object] = {
                "case": "a",
                "tokens_per_s": speeds[engine],
                "peak_gib": 1,
                "host_rss_gib": 2,
                "lines": [],
            }
            return worker(f"print({PREFIX!r} + {json.dumps(figures)!r})")

        monkeypatch.setattr(peers, "worker_command", command)

    return install


WORDS = ("peers", "--shape", "tiny", "--layers", "1", "--mean-length", "20", "--case", "a=40")


def test_ratios(run_bench, pretended):
    pretended({"zero3": 50.0, "fsdp2": 100.0, "reference": 25.0, "stream": 200.0})
    figures = run_bench(*WORDS).figures("a")
    assert figures.pop("matmul_fraction") > 0
    assert figures == {
        "zero3_tokens_per_s": 50, "zero3_peak_gib": 1, "zero3_host_rss_gib": 2, "vs_zero3_offload": 4,
        "fsdp2_tokens_per_s": 100, "fsdp2_peak_gib": 1, "fsdp2_host_rss_gib": 2, "vs_fsdp2_offload": 2,
        "reference_tokens_per_s": 25, "reference_peak_gib": 1, "reference_host_rss_gib": 2, "vs_reference_schedule": 8,
        "tokens_per_s": 200, "peak_gib": 1, "host_rss_gib": 2,
    }  # fmt: skip


def test_an_interrupted_command_leaves_what_is_known(run_bench, pretended, monkeypatch, tmp_path):
    """The ratios to the peers before it are reported with this package's figures, those to later ones with theirs."""
    pretended({"zero3": 50.0, "fsdp2": 100.0, "reference": 25.0, "stream": 200.0})
    run, engines = peers.run_worker, []

    def once_interrupted(command, limit):
        if len(engines) == 3:
            raise KeyboardInterrupt
        engines.append(command)
        return run(command, limit)

    monkeypatch.setattr(peers, "run_worker", once_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench(*WORDS)
    written = json.loads((tmp_path / "record.json.partial").read_text())
    ratios = {r["metric"]: r["value"] for r in written["results"] if r["metric"].startswith("vs_")}
    assert ratios == {"vs_zero3_offload": 4, "vs_fsdp2_offload": 2} and written["raw"][-1] == "== reference"


def test_a_terminated_command_ends_its_worker_and_leaves_what_is_known(tmp_path):
    pid, record = tmp_path / "pid", tmp_path / "record.json"
    waits = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(f'{{os.getpid()}} '); time.sleep(3600)"
    code = (
        "import sys; from megatrain_rl import cli; from megatrain_rl.bench.peers import run as peers; "
        f"peers.worker_command = lambda *_: [sys.executable, '-c', {waits!r}]; "
        "peers._GRACE_SECONDS = 1; "
        f"cli.main(['bench', {', '.join(map(repr, WORDS))}, '--quick', '--json', {str(record)!r}])"
    )
    process = subprocess.Popen(worker(code), stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line == "== zero3\n":
            while not (pid.exists() and pid.read_text().endswith(" ")):
                time.sleep(0.02)
            process.terminate()
    assert process.wait(60) == 143
    assert json.loads((tmp_path / "record.json.partial").read_text())["raw"][-1] == "== zero3"
    assert not psutil.pid_exists(int(pid.read_text()))


def test_a_failed_engine_ends_the_command_after_the_rest(run_bench, pretended, tmp_path):
    pretended({"zero3": 50.0, "fsdp2": None, "reference": 25.0, "stream": 200.0})
    with pytest.raises(SystemExit) as stopped:
        run_bench(*WORDS)
    assert "fsdp2" in str(stopped.value.code)
    written = json.loads((tmp_path / "record.json.partial").read_text())
    metrics = {r["metric"] for r in written["results"]}
    assert {"tokens_per_s", "vs_zero3_offload"} <= metrics and not any("fsdp2" in metric for metric in metrics)
    failed = written["raw"].index("FAILED: exit status 1")
    assert written["raw"][failed - 1 : failed + 2] == ["== fsdp2", "FAILED: exit status 1", "broken"]
