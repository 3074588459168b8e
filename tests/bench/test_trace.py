"""A trace is cut into rows, and drawn."""

import gzip
import json

import pytest

from megatrain_rl.bench.trace import Trace, draw_timeline, profile_step, timeline_rows

EVENTS = [
    {"ph": "X", "cat": "gpu_user_annotation", "name": "megatrain_rl bench step", "ts": 7_000_000.0, "dur": 1.0},
    {"ph": "X", "cat": "user_annotation", "name": "megatrain_rl bench step", "ts": 1_000_000.0, "dur": 5_000_000.0},
    {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1_500_000.0, "dur": 250_000.0},
    {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 1_800_000.0, "dur": 10.0},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 2_000_000.0, "dur": 100_000.0},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 3_000_000.0, "dur": 200_000.0},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 3_100_000.0, "dur": 20.0},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1_400_000.0, "dur": 20.0},
    {"ph": "M", "name": "process_name", "ts": 0.0},
]


@pytest.fixture(params=["t.json", "t.json.gz"])
def trace(tmp_path, request) -> Trace:
    path = tmp_path / request.param
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        json.dump({"traceEvents": EVENTS}, file)
    return Trace(path=path, started=50.0)


def test_rows(trace):
    rows = timeline_rows(trace, host_intervals=[(40.0, 41.0), (50.5, 51.0), (52.0, 52.25)])
    assert rows == {
        "compute": [(0.5, 0.25), (0.8, 1e-5), (2.1, 2e-5)],
        "H2D": [(1.0, 0.1)],
        "D2H": [(2.0, 0.2)],
        "host AdamW": [(0.5, 0.5), (2.0, 0.25)],
    }
    assert set(timeline_rows(trace)) == {"compute", "H2D", "D2H"}


def test_picture(trace, tmp_path):
    bars = draw_timeline(trace, tmp_path / "t.png", title="a step", host_intervals=[(50.5, 51.0)])
    assert bars == {"compute": 3, "H2D": 1, "D2H": 1, "host AdamW": 1}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_profile_waits_for_the_end_inside_the_trace(tmp_path):
    order = []
    trace = profile_step(lambda: order.append("step"), lambda: order.append("finish"), tmp_path / "t.json")
    assert order == ["step", "finish"]
    assert timeline_rows(trace) == {"compute": [], "H2D": [], "D2H": []}
