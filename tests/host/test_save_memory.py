"""Saving takes no host memory to speak of: a run fills the host, and a checkpoint comes in the midst of it."""

import re
import subprocess
import sys
from pathlib import Path

import tiny

SCRIPT = """
import sys
from pathlib import Path
import tiny
from megatrain_rl.config import AdamWConfig, StreamConfig
from megatrain_rl.trainer import StreamTrainer

def kib(name):
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)).split()[1])

trainer = StreamTrainer.from_config(
    tiny.config(layers=1, vocab_size=1 << 16, hidden_size=256), adamw=AdamWConfig(), device="cpu",
    config=StreamConfig(param_dtype="float32", optimizer="torch", cpu_threads=1),
)
trainer.save_checkpoint(sys.argv[1] + "/first")  # loads what saving needs
before = kib("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
trainer.save_checkpoint(sys.argv[1] + "/second")
print("took", (kib("VmHWM:") - before) * 1024)
"""


def test_a_checkpoint_is_written_without_a_copy_in_memory(tmp_path):
    tests = str(Path(tiny.__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{SCRIPT}", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    took = int(re.search(r"took (-?\d+)", run.stdout)[1])
    largest = max(file.stat().st_size for file in (tmp_path / "second").rglob("*.safetensors"))
    assert largest > 128 << 20
    assert took < largest / 8
