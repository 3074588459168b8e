"""The record of a run and its pictures, from made-up histories."""

from pathlib import Path

import pytest
import torch
from run_fakes import GIB, STAGES_S

from megatrain_rl.watch import report
from megatrain_rl.watch.peaks import Point

STAGES = report.Stages(
    in_step={
        "gen": "generate",
        "reward": "reward",
        "ref": "reference",
        "old_log_prob": "old",
        "update_actor": "update",
    },
    after_step={"update_weights": "weight sync"},
)
# matplotlib's first colours
COLOURS = [(31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189), (140, 86, 75)]


def points(n: int, *, gpu: bool = True, begin: float = 1000.0) -> list[Point]:
    made = []
    for i in range(n):
        low = {"trainer_rss": 3 * GIB, "run_rss": 12 * GIB}
        if gpu:
            low |= {"trainer_gpu": 2 * GIB, "engine_gpu": 9 * GIB, "both_gpu": 20 * GIB, "device_gpu": 30 * GIB}
        made.append(Point(time=begin + i, low=low, high={c: v + (i % 5) * GIB for c, v in low.items()}))
    return made


def write_run(folder: Path, *, steps: int = 4, gpu: bool = True, stages: report.Stages | None = None) -> None:
    file = report.RunFile(folder, stages=stages)
    for step in range(1, steps + 1):
        file.write(
            step=step,
            stages_s=STAGES_S,
            metrics={report.OPTIMIZER_WAIT: 0.1 * step},
            memory=points(10, gpu=gpu, begin=1000.0 + 10 * step),
        )
    file.close()


def colours(path: Path) -> set[tuple[int, ...]]:
    """Colours that fill at least a hundred pixels."""
    from matplotlib import image

    pixels = torch.from_numpy((image.imread(path)[..., :3] * 255).astype("int64")).reshape(-1, 3)
    found, counts = pixels.unique(dim=0, return_counts=True)
    return {tuple(colour.tolist()) for colour, n in zip(found, counts, strict=True) if n >= 100}


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("steps, stages", [(1, None), (4, STAGES), (1000, STAGES)])
def test_pictures_are_drawn(tmp_path, steps, stages, gpu):
    write_run(tmp_path, steps=steps, gpu=gpu, stages=stages)
    memory, stages = report.draw(tmp_path)
    assert (memory.name, stages.name) == ("memory.png", "stages.png")
    drawn = colours(memory)
    for colour in COLOURS[: 4 if gpu else 2]:
        band = [round(255 - 0.3 * (255 - c)) for c in colour]
        assert colour in drawn and any(max(abs(a - b) for a, b in zip(d, band, strict=True)) <= 1 for d in drawn)
    # a bar per stage that took time, and one for the part of a step that no stage covers
    assert set(COLOURS) <= colours(stages)


def test_bars_are_made_of_the_stages_that_the_start_names(tmp_path, bars):
    """They have its order and its labels. Stages that took no time, or that it does not name, are left out."""
    named = report.Stages(in_step={"gen": "generate", "reward": "reward"}, after_step={"update_weights": "weight sync"})
    write_run(tmp_path, steps=2, stages=named)
    report.draw(tmp_path)
    assert bars == [("generate", 2.0), ("other", 6.0), ("weight sync", 0.5)]


def test_without_names_the_bars_are_made_of_all_stages(tmp_path, bars):
    write_run(tmp_path, steps=2)
    report.draw(tmp_path)
    parts = {name: seconds for name, seconds in STAGES_S.items() if name != "step"}
    assert bars == [*parts.items(), ("other", 0.5)]


@pytest.fixture
def bars(monkeypatch) -> list[tuple[str, float]]:
    """(label, height of the first bar) of what is drawn, from the bottom up."""
    from matplotlib.axes import Axes

    drawn = []
    bar = Axes.bar

    def spy(self, x, height, **settings):
        drawn.append((settings["label"], height[0]))
        return bar(self, x, height, **settings)

    monkeypatch.setattr(Axes, "bar", spy)
    return drawn


def test_nothing_seen_is_no_picture(tmp_path):
    report.RunFile(tmp_path).close()
    assert report.draw(tmp_path) == []


def test_thinned_picture_keeps_the_peak():
    rows = [{"time": 5.0 + i, "a": [1.0, 2.0 + 97 * (i == 7777)]} for i in range(10_000)]
    rows.insert(3, {"time": 8.5})
    seconds, low, high = report._thinned(rows, "a", rows[0]["time"])
    assert len(seconds) <= report._MEMORY_POINTS and seconds[0] == 0.0
    assert max(high) == 99.0 and set(low) == {1.0}


def test_a_killed_and_resumed_run(tmp_path):
    """A torn line is left out, the pictures are of the last start, and the record keeps everything."""
    write_run(tmp_path, steps=3)
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"step": 4, "ti')
    assert [line["step"] for line in report.read(tmp_path)] == [1, 2, 3]
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write("\n")
    write_run(tmp_path, steps=2)
    assert [line["step"] for line in report.read(tmp_path)] == [1, 2]
    assert (tmp_path / "run.jsonl").read_text().count('"stages_s"') == 5


def test_startup_of_the_last_start(tmp_path):
    for phases in ({"Ray": 60.0}, {"Ray": 50.0, "rollout engine": 90.0}):
        report.RunFile(tmp_path, phases).close()
        assert report.startup_s(tmp_path) == phases
    write_run(tmp_path)
    assert report.startup_s(tmp_path) == {}


def test_missing_columns_are_null(tmp_path):
    file = report.RunFile(tmp_path)
    file.write(step=1, stages_s={}, metrics={}, memory=points(1) + points(1, gpu=False, begin=1001.0))
    file.close()
    [line] = report.read(tmp_path)
    assert line["memory"]["trainer_gpu_gib"] == [[2.0, 2.0], None]
    assert report.draw(tmp_path) == [tmp_path / "memory.png"]
