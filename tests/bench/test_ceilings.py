"""Ceilings count the operations and bytes they name."""

import pytest
import torch

from megatrain_rl.bench import ceilings
from megatrain_rl.bench.record import Record

CPU = torch.device("cpu")


@pytest.fixture
def one_second(monkeypatch):
    """Every operation runs, and takes a second by the clock."""

    def timed(device, operation, repeats):
        operation()
        return 1.0

    monkeypatch.setattr(ceilings, "timed", timed)


def test_operations_and_bytes_counted(one_second):
    record = Record([])
    out = ceilings.measure_ceilings(CPU, record, quick=True)
    assert out.matmul_tflops == out.matmul_burst_tflops == 2 * 256**3 / 1e12
    assert out.h2d_gb_s == out.d2h_gb_s == (1 << 20) / 1e9
    assert out.both_gb_s == 2 * (1 << 20) / 1e9
    assert out.host_copy_gb_s == out.host_update_gb_s == 2 * (1 << 22) / 1e9  # read and written
    assert len(record.raw) == 4 and not record.results


def test_sustained_is_what_remains_after_the_first_third(monkeypatch):
    """A card that slows down is not held against its first moments, and they are told."""
    monkeypatch.setattr(ceilings, "_matmul_seconds", lambda *_: [1.0, 1.0, 2.0, 2.0, 4.0, 2.0])
    sustained, burst = ceilings.matmul_tflops(CPU, Record([]), quick=True)
    assert burst == 2 * 256**3 / 1e12 and sustained == burst / 2


def test_timed_divides_by_the_repeats(monkeypatch):
    """By a clock on which an operation takes three seconds."""
    calls = []
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: 100.0 + 3.0 * len(calls))
    assert ceilings.timed(CPU, lambda: calls.append(None), 5) == 3.0 and len(calls) == 5


def test_threads_are_as_before():
    before = torch.get_num_threads()
    ceilings.host_copy_gb_s(Record([]), quick=True)
    assert torch.get_num_threads() == before
