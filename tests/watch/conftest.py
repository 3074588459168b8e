"""`proc`: a run under Ray in the place of /proc."""

from pathlib import Path

import psutil
import pytest
from run_fakes import FakeProc, ray_run


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    fake = ray_run(tmp_path / "proc")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(fake.root))
    return fake
