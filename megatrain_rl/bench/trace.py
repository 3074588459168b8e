"""A chrome trace of one step, and a picture of it.

The picture shows what the compute lane, the two copy lanes and the host optimizer did when.
"""

import gzip
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "megatrain_rl bench step"
_ROWS = ("compute", "H2D", "D2H")
_COLOURS = {"compute": "tab:blue", "H2D": "tab:green", "D2H": "tab:orange", "host AdamW": "tab:red"}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A written trace. path: the chrome trace. started: `time.perf_counter()` where its mark begins, which ties both
    clocks together."""

    path: Path
    started: float


def profile_step(step: Callable[[], object], finish: Callable[[], None], path: Path) -> Trace:
    """Profile one step until everything it started has ended."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities) as profiler:
        started = time.perf_counter()
        with record_function(_MARK):
            step()
            finish()
    profiler.export_chrome_trace(str(path))
    return Trace(path=path, started=started)


def draw_timeline(
    trace: Trace, picture: Path, *, title: str, host_intervals: Sequence[tuple[float, float]] = ()
) -> dict[str, int]:
    """Draw the trace into the PNG `picture`; returns how many bars each row has.

    host_intervals: (start, end) of the host optimizer's work by `time.perf_counter()`; a row of its own when given.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = timeline_rows(trace, host_intervals)
    figure, axes = pyplot.subplots(figsize=(14, 0.6 * len(rows) + 1.2))
    for place, (name, spans) in enumerate(rows.items()):
        axes.broken_barh(spans, (len(rows) - place - 0.4, 0.8), facecolors=_COLOURS[name], linewidth=0)
    axes.set_yticks([len(rows) - place for place in range(len(rows))], list(rows))
    axes.set_xlabel("seconds")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
    return {name: len(spans) for name, spans in rows.items()}


def timeline_rows(
    trace: Trace, host_intervals: Sequence[tuple[float, float]] = ()
) -> dict[str, list[tuple[float, float]]]:
    """(start, length) in seconds since the step began, by row."""
    opened = gzip.open if trace.path.suffix == ".gz" else open
    with opened(trace.path, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    begin = next(e["ts"] for e in events if e["name"] == _MARK and e["cat"] == "user_annotation")
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in _ROWS}
    for event in events:
        row = _row(event)
        if row is not None:
            rows[row].append(((event["ts"] - begin) / 1e6, event["dur"] / 1e6))
    if host_intervals:
        # what ended before the step began is of earlier ones
        rows["host AdamW"] = [
            (start - trace.started, end - start) for start, end in host_intervals if end > trace.started
        ]
    return rows


def _row(event: dict) -> str | None:
    """The row of an event, if it has one. Kernels compute; a copy belongs to its direction. Copies on the device and
    fills are work of the compute lane."""
    category = event.get("cat")
    if category == "gpu_memcpy":
        return "H2D" if "HtoD" in event["name"] else "D2H" if "DtoH" in event["name"] else "compute"
    return "compute" if category in ("kernel", "gpu_memset") else None
