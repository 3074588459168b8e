"""A series of steps, timed, and the lines and figures that training and forward-only benchmarks share.

The time of a step is the interval between successive returns of the call that ends a step, in an unbroken series. The
host optimizer of a step may still be running then and overlaps the next step's forward, which its interval therefore
pays for; the last interval closes with `finish`, which waits for everything. The figure is the median interval; (all of
the series) / steps is printed beside it.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatrain_rl.bench.ceilings import Ceilings
from megatrain_rl.bench.flops import LightSpeed
from megatrain_rl.bench.record import Record


@dataclass(frozen=True, kw_only=True)
class Series:
    """Seconds of each steady step (`intervals`), and of all of them with the wait at their end (`total`)."""

    intervals: list[float]
    total: float

    @property
    def median(self) -> float:
        return statistics.median(self.intervals)


def run_series(
    step: Callable[[int], str], finish: Callable[[], None], *, warmup: int, steps: int, say: Callable[[str], None]
) -> Series:
    """Time `steps` steps after `warmup` others. step(i) runs step i and returns what to print of it. Lines are printed
    between steps, so they cost what a print costs."""
    intervals: list[float] = []
    start = previous = time.perf_counter()
    for i in range(warmup + steps):
        if i == warmup:
            start = previous
        text = step(i)
        if i == warmup + steps - 1:
            finish()
        now = time.perf_counter()
        kind = "warm-up" if i < warmup else "step"
        say(f"{kind} {i}: {now - previous:.3f} s, {text}")
        if i >= warmup:
            intervals.append(now - previous)
        previous = now
    return Series(intervals=intervals, total=previous - start)


def report_speed(
    record: Record, case: str, series: Series, *, tokens: int, flops: float, light: LightSpeed, ceilings: Ceilings
) -> None:
    """Put speed, and what it is of each ceiling, into the record. flops: useful ones of a step. light: its bound."""
    seconds = series.median
    tflops = flops / seconds / 1e12
    record.say(
        f"{case}: {tokens} tokens, useful {flops / 1e12:.4g} TFLOP; median step {seconds:.3f} s, (whole series with its last wait) / "
        f"steps {series.total / len(series.intervals):.3f} s; {light}"
    )
    record.result(case, "step_s", seconds, "s")
    record.result(case, "useful_tflops", tflops, "TFLOP/s")
    record.result(case, "matmul_fraction", tflops / ceilings.matmul_tflops, "")
    record.result(case, "matmul_burst_fraction", tflops / ceilings.matmul_burst_tflops, "")
    record.result(case, "speed_of_light", light.seconds / seconds, "")
    record.result(case, "tokens_per_s", tokens / seconds, "1/s")
