"""The record of a run, `run.jsonl`, and its two pictures, `memory.png` and `stages.png`, in one folder.

A line for each start of the run:
    {"start": Unix seconds, "startup_s": seconds by phase, "stages": the fields of `Stages`, if the run has some,
     "engine": the fields of `EngineShare`, if the run has one}
and one for each step that is observed, with `"step": null` for what was seen after the last one:
    {"step", "time": Unix seconds, "stages_s": seconds by stage, of which "step" is the whole step, "metrics": by name,
     "memory": {"time": [Unix seconds, ...], column in GiB: [[least, most], ...]}}

Lines are complete when they are written, so a killed run leaves those of its steps. A resumed run appends, and the
pictures show the last start:

    python -m megatrain_rl.watch.report FOLDER

draws them again. Only the pictures need matplotlib. Used by monitor.py.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megatrain_rl.watch.peaks import Point

if TYPE_CHECKING:  # it may be missing, and is imported when something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30
OPTIMIZER_WAIT = "megatrain/optimizer_wait_s"
SYNC_WAIT = "megatrain/weight_sync_wait_s"  # of it, in weight syncs
BEYOND_SHARE = "megatrain/engine_beyond_share_gib"  # the most that the engine held, less its share
DEVICE_FREE = "megatrain/device_free_gib"  # the least that was free

_BARS = 300
_MEMORY_POINTS = 3000
_PANELS = (
    ("GPU memory, GiB", {"device_gpu": "all of the GPU", "both_gpu": "trainer + engine", "engine_gpu": "engine", "trainer_gpu": "trainer"}),
    ("host memory, GiB", {"run_rss": "all processes of the run", "trainer_rss": "trainer"}),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EngineShare:
    """GPU memory that a rollout engine was given, and what it may take beyond that, in GB (1e9 bytes)."""

    share_gb: float
    beyond_gb: float


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages that the picture shows, from the bottom up: their labels by their names in `stages_s`.

    in_step: parts of a step, none of them inside another; what they leave of its seconds is drawn as "other".
    after_step: what follows a step and is not in its seconds, drawn on top.
    """

    in_step: dict[str, str]
    after_step: dict[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        return [*self.in_step.values(), "other", *self.after_step.values()]

    def seconds(self, stages_s: dict[str, float]) -> list[float]:
        """The seconds of each of `labels` in a step with these seconds by stage, of which "step" is the whole."""
        within = [stages_s.get(name, 0.0) for name in self.in_step]
        other = max(0.0, stages_s["step"] - sum(within))
        return [*within, other, *(stages_s.get(name, 0.0) for name in self.after_step)]


class RunFile:
    """`run.jsonl`, open for another start. startup_s: seconds of each phase before the first step. stages: None draws
    all stages, in the order in which they are first seen. engine: the share of the rollout engine, if there is one."""

    def __init__(
        self,
        folder: Path,
        startup_s: dict[str, float] | None = None,
        stages: Stages | None = None,
        engine: EngineShare | None = None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "run.jsonl").open("a", buffering=1)
        parts = {"stages": stages, "engine": engine}
        named = {name: dataclasses.asdict(part) for name, part in parts.items() if part is not None}
        self._write({"start": time.time(), "startup_s": startup_s or {}} | named)

    def write(
        self, *, step: int | None, stages_s: dict[str, float], metrics: dict[str, float], memory: list[Point]
    ) -> None:
        """step: None for what was seen after the last one."""
        columns = sorted({column for point in memory for column in point.high})
        series: dict[str, list[Any]] = {"time": [round(point.time, 2) for point in memory]}
        for column in columns:
            series[f"{column}_gib"] = [
                [round(p.low[column] / GIB, 3), round(p.high[column] / GIB, 3)] if column in p.high else None
                for p in memory
            ]
        self._write({"step": step, "time": time.time(), "stages_s": stages_s, "metrics": metrics, "memory": series})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """Lines since the last start, a torn last one left out."""
    return _read(folder)[1]


def startup_s(folder: Path) -> dict[str, float]:
    """Seconds of each phase before the first step of the last start; empty where nobody timed them."""
    return _read(folder)[0].get("startup_s", {})


def engine_share(folder: Path) -> EngineShare | None:
    """The share that the rollout engine had in the last start; None where it is not recorded."""
    fields = _read(folder)[0].get("engine")
    return None if fields is None else EngineShare(**fields)


def start(folder: Path) -> float:
    """Unix seconds when the first step of the last start began."""
    return _read(folder)[0]["start"]


def _read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The line of the last start and those since."""
    start: dict[str, Any] = {}
    lines: list[dict[str, Any]] = []
    for text in (folder / "run.jsonl").read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if "start" in line:
            start, lines = line, []
        else:
            lines.append(line)
    return start, lines


def draw(folder: Path) -> list[Path]:
    """Draw what there is to draw; the pictures' paths. ImportError without matplotlib."""
    start, lines = _read(folder)
    made = [
        _draw_memory(lines, start.get("start"), folder / "memory.png"),
        _draw_stages(lines, start.get("stages"), folder / "stages.png"),
    ]
    return [path for path in made if path is not None]


def _draw_memory(lines: Sequence[dict[str, Any]], begin: float | None, path: Path) -> Path | None:
    """Each column as a band from least to most, its upper edge drawn out. begin: zero of the axis, Unix seconds."""
    rows = [
        {"time": line["memory"]["time"][i], **{c: values[i] for c, values in line["memory"].items() if c != "time"}}
        for line in lines
        for i in range(len(line["memory"]["time"]))
    ]
    shown = {column: label for _, panel in _PANELS for column, label in panel.items()}
    present = {column for column in shown if any(row.get(f"{column}_gib") for row in rows)}
    panels = [(title, [c for c in columns if c in present]) for title, columns in _PANELS]
    panels = [(title, columns) for title, columns in panels if columns]
    if not panels:
        return None
    begin = rows[0]["time"] if begin is None else begin
    figure, all_axes = _figure(len(panels))
    for axes, (title, columns) in zip(all_axes, panels, strict=True):
        for column in columns:
            seconds, low, high = _thinned(rows, f"{column}_gib", begin)
            [line] = axes.plot(seconds, high, linewidth=1, label=f"{shown[column]}, peak {max(high):.2f}")
            axes.fill_between(seconds, low, high, alpha=0.3, color=line.get_color(), linewidth=0)
        axes.set(ylabel=title, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize="small")
    all_axes[-1].set_xlabel("seconds since the first step began, start-up before it")
    figure.savefig(path, dpi=120)
    return path


def _thinned(rows: Sequence[dict[str, Any]], column: str, begin: float) -> tuple[list[float], list[float], list[float]]:
    """Seconds since `begin`, least and most; neighbours joined until a picture can show them all."""
    values = [(row["time"] - begin, *row[column]) for row in rows if row.get(column)]
    each = -(-len(values) // _MEMORY_POINTS)
    groups = [values[i : i + each] for i in range(0, len(values), each)]
    return (
        [group[0][0] for group in groups],
        [min(low for _, low, _ in group) for group in groups],
        [max(high for _, _, high in group) for group in groups],
    )


def _draw_stages(lines: Sequence[dict[str, Any]], named: dict[str, Any] | None, path: Path) -> Path | None:
    """A bar for each step, or for the mean of neighbouring steps when there are many. The wait for the optimizer is a
    line over the bars, since it lies within its stages."""
    steps = [line for line in lines if "step" in line["stages_s"]]
    if not steps:
        return None
    stages = _stages(steps, named)
    each = -(-len(steps) // _BARS)
    groups = [steps[i : i + each] for i in range(0, len(steps), each)]
    middles = [(group[0]["step"] + group[-1]["step"]) / 2 for group in groups]
    bars = [_mean_columns([stages.seconds(line["stages_s"]) for line in group]) for group in groups]
    figure, [axes] = _figure(1)
    below = [0.0] * len(groups)
    for label, heights in zip(stages.labels, zip(*bars, strict=True), strict=True):
        if any(heights):
            axes.bar(middles, heights, bottom=below, width=0.9 * each, label=label)
            below = [b + h for b, h in zip(below, heights, strict=True)]
    wait = [fmean(line["metrics"].get(OPTIMIZER_WAIT, 0.0) for line in group) for group in groups]
    axes.plot(middles, wait, color="black", marker=".", linewidth=1, label="of it, waiting for the optimizer")
    axes.set(xlabel="step", ylabel="seconds")
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    figure.savefig(path, dpi=120)
    return path


def _stages(steps: Sequence[dict[str, Any]], named: dict[str, Any] | None) -> Stages:
    """The stages that the start's line names; without a name, all that the steps have, as they are called."""
    if named is not None:
        return Stages(**named)
    return Stages(in_step={name: name for line in steps for name in line["stages_s"] if name != "step"})


def _mean_columns(rows: list[list[float]]) -> list[float]:
    return [fmean(column) for column in zip(*rows, strict=True)]


def _figure(panels: int) -> tuple["Figure", list["Axes"]]:
    """A figure of its own, so that no drawing backend is chosen for the process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 3 * panels), layout="constrained")
    return figure, list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])


if __name__ == "__main__":
    for picture in draw(Path(sys.argv[1])):
        print(picture)
