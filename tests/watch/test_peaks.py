"""Peaks survive thinning."""

import itertools

import pytest

from megatrain_rl.watch.peaks import PeakSeries


@pytest.mark.parametrize("samples", [7, 8, 9, 1000, 12345])
def test_thinning_keeps_bounds_order_and_peaks(samples):
    series = PeakSeries(8)
    for i in range(samples):
        value = 100 + i % 3
        if i == samples // 2:
            value = 999
        if i == samples // 3:
            value = 1
        series.add(float(i), {"a": value} | ({"rare": 7} if i == samples - 1 else {}))
    points = series.points
    assert len(points) <= 8 and (samples < 9 or len(points) >= 4)
    gaps = {later.time - p.time for p, later in itertools.pairwise(points)}
    assert points[0].time == 0 and len(gaps) == 1 and min(gaps) > 0, "in order, and all of them hold as many samples"
    assert max(p.high["a"] for p in points) == 999 and min(p.low["a"] for p in points) == 1
    assert points[-1].high["rare"] == 7 and "rare" not in points[0].high
    [peak] = [i for i, p in enumerate(points) if p.high["a"] == 999]
    later = points[peak + 1].time if peak + 1 < len(points) else samples
    assert points[peak].time <= samples // 2 < later, "the peak stays where it was"
