"""Imports go one way, the core knows nothing of VERL, and importing touches no GPU."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megatrain_rl

PACKAGE = Path(megatrain_rl.__file__).parent
# From the outside in; a module may import from its own room and from rooms further right.
ROOMS = [
    {"cli"}, {"bench", "verl_plugin"}, {"rollout"}, {"trainer", "profiling"}, {"streaming", "checkpoint"},
    {"head", "optim", "transfer", "planner"}, {"host"}, {"model"}, {"objectives"}, {"batch"}, {"ops"}, {"config"},
]  # fmt: skip
FRAMEWORKS = {"verl", "ray", "vllm", "tensordict", "hydra", "omegaconf"}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def room(name: str) -> int:
    return next(i for i, names in enumerate(ROOMS) if name in names)


MODULES = [f for f in sorted(PACKAGE.rglob("*.py")) if f != PACKAGE / "__init__.py" and "configs" not in f.parts]


@pytest.mark.parametrize("file", MODULES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_go_one_way(file):
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imports(file):
        parts = name.split(".")
        if parts[0] == "megatrain_rl" and len(parts) > 1 and not name.startswith("megatrain_rl.__"):
            assert parts[1] == own or room(parts[1]) > room(own) or room(parts[1]) == room(own), f"{own} imports {name}"
        if parts[0] in FRAMEWORKS:
            assert own in ("verl_plugin", "rollout"), f"{own} imports {name}"


def test_one_home_for_streams_and_pinning():
    for file in MODULES:
        text = file.read_text()
        where = file.relative_to(PACKAGE)
        if "cuda.Stream(" in text or "cuda.Event(" in text:
            assert where == Path("transfer/lanes.py")
        if "cudaHostRegister" in text or "pin_memory" in text:
            assert where == Path("host/pinned.py")


def test_importing_the_package_touches_no_gpu_and_no_torch():
    code = (
        "import sys, megatrain_rl; assert 'torch' not in sys.modules; import megatrain_rl.trainer, torch; "
        "assert not torch.cuda.is_initialized(); assert 'verl' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
