"""Samples over time in a bounded number of points, which keep the least and the most. Used by memory.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """A stretch of samples. time: Unix seconds of the first one. low, high: least and most of each column."""

    time: float
    low: dict[str, int]
    high: dict[str, int]

    def joined(self, later: "Point") -> "Point":
        return Point(
            time=self.time,
            low={c: min(p.low[c] for p in (self, later) if c in p.low) for c in self.low | later.low},
            high={c: max(p.high[c] for p in (self, later) if c in p.high) for c in self.high | later.high},
        )


class PeakSeries:
    """At most `limit` points, however many samples: once full, neighbours are joined and every later point holds twice
    the samples. Peaks and troughs stay."""

    def __init__(self, limit: int):
        assert limit >= 2 and limit % 2 == 0
        self.points: list[Point] = []
        self._limit = limit
        self._samples_each = 1
        self._samples_in_last = 1

    def add(self, now: float, values: dict[str, int]) -> None:
        point = Point(time=now, low=values, high=values)
        if self.points and self._samples_in_last < self._samples_each:
            self.points[-1] = self.points[-1].joined(point)
            self._samples_in_last += 1
            return
        if len(self.points) == self._limit:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [first.joined(second) for first, second in pairs]
            self._samples_each *= 2
        self.points.append(point)
        self._samples_in_last = 1
