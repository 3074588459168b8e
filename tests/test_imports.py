"""Imports go one way and in no circle, the core knows nothing of VERL, and importing touches no GPU."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import megatrain_rl
import verl_patches

PACKAGE = Path(megatrain_rl.__file__).parent
ROOT = PACKAGE.parent
# From the outside in. A module may import from its own room and from rooms further down. `bench` and `verl_plugin`
# stand side by side.
ROOMS = [
    {"megatrain_rl.cli"},
    {"megatrain_rl.bench", "megatrain_rl.verl_plugin"},
    {"megatrain_rl.rollout", "verl_patches"},
    {"megatrain_rl.trainer"},
    {"megatrain_rl.watch"},
    {"megatrain_rl.streaming", "megatrain_rl.checkpoint"},
    {"megatrain_rl.head", "megatrain_rl.optim", "megatrain_rl.transfer", "megatrain_rl.planner"},
    {"megatrain_rl.host"},
    {"megatrain_rl.model"},
    {"megatrain_rl.objectives"},
    {"megatrain_rl.batch"},
    {"megatrain_rl.ops"},
    {"megatrain_rl.config"},
]
# The same within VERL's side: its rooms know each other only by what lies below them.
PLUGIN = "megatrain_rl.verl_plugin"
PLUGIN_ROOMS = [
    {f"{PLUGIN}.targets", f"{PLUGIN}.knobs"},
    {f"{PLUGIN}.register"},
    {f"{PLUGIN}.task_runner", f"{PLUGIN}.driver", f"{PLUGIN}.engine", f"{PLUGIN}.platform_cpu"},
    {f"{PLUGIN}.on_policy"},
    {f"{PLUGIN}.monitoring", f"{PLUGIN}.startup_times", f"{PLUGIN}.supported"},
    {f"{PLUGIN}.settings", f"{PLUGIN}.registered"},
    {f"{PLUGIN}.config"},
]
FRAMEWORKS = {"verl", "ray", "vllm", "tensordict", "hydra", "omegaconf", "transfer_queue"}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(f): f for f in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "verl_patches").rglob("*.py")])}


def imports(file: Path) -> set[str]:
    """Names that the file imports, also within functions. An import that only a type checker reads does not count."""
    return named_by(runtime_nodes(ast.parse(file.read_text())))


def named_by(nodes: Iterable[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from (node for other in child.orelse for node in (other, *runtime_nodes(other)))
            continue
        yield child
        yield from runtime_nodes(child)


def own_imports(file: Path) -> set[str]:
    """Modules of this project that the file imports."""
    return {name for name in imports(file) if name in FILES} - {module_name(file)}


def room(name: str, rooms: list[set[str]]) -> int | None:
    for i, names in enumerate(rooms):
        if any(name == own or name.startswith(f"{own}.") for own in names):
            return i
    return None


def same_room(a: str, b: str, rooms: list[set[str]]) -> bool:
    return any(all(name == own or name.startswith(f"{own}.") for name in (a, b)) for names in rooms for own in names)


def circles(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("name", FILES)
def test_imports_go_one_way(name):
    for rooms in (ROOMS, PLUGIN_ROOMS):
        place = room(name, rooms)
        for other in own_imports(FILES[name]):
            there = room(other, rooms)
            if place is None or there is None or same_room(name, other, rooms):
                continue
            # rooms of one line of ROOMS may import each other, except the two above; another test looks for circles
            beside = there == place and rooms is ROOMS and place != room(PLUGIN, ROOMS)
            allowed = there > place or beside
            assert allowed, f"{name} imports {other}, which is not below it"


def test_every_module_has_a_room():
    packages = {"megatrain_rl", PLUGIN, "megatrain_rl.configs"}
    assert [n for n in FILES if n not in packages and room(n, ROOMS) is None] == []
    assert [n for n in FILES if n.startswith(f"{PLUGIN}.") and room(n, PLUGIN_ROOMS) is None] == []


def test_no_circle():
    """Neither modules nor the rooms that they stand in import each other in a circle."""
    graph = {name: own_imports(file) for name, file in FILES.items()}
    # a module's import of the package that it lies in says only where it lies
    graph = {name: {o for o in others if not name.startswith(f"{o}.")} for name, others in graph.items()}
    assert circles(graph) == []
    rooms = [own for names in (*ROOMS, *PLUGIN_ROOMS) for own in names if own != PLUGIN]
    of = {name: next((r for r in rooms if name == r or name.startswith(f"{r}.")), name) for name in FILES}
    between: dict[str, set[str]] = {}
    for name, others in graph.items():
        between.setdefault(of[name], set()).update(of[o] for o in others if of[o] != of[name])
    assert circles(between) == []


def test_a_circle_would_be_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) and not circles({"a": {"b", "c"}, "b": {"c"}})


@pytest.mark.parametrize("name", FILES)
def test_only_verls_side_imports_verl(name):
    """Not even for a type checker."""
    allowed = name.startswith((PLUGIN, "megatrain_rl.rollout", "verl_patches"))
    found = named_by(ast.walk(ast.parse(FILES[name].read_text())))
    assert allowed or {i.split(".")[0] for i in found}.isdisjoint(FRAMEWORKS)


def test_the_tests_shadow_no_package():
    """tests/ is on the path of some of their processes."""
    assert Path(verl_patches.__file__).parent == ROOT / "verl_patches"
    assert not {folder.name for folder in (ROOT / "tests").iterdir()} & {"verl_patches", "megatrain_rl"}


def test_patches_know_nothing_of_the_package():
    """A function of the package that a patch calls is handed to it."""
    for name, file in FILES.items():
        if name.startswith("verl_patches"):
            assert {i.split(".")[0] for i in imports(file)}.isdisjoint({"megatrain_rl"}), name


def test_one_home_for_streams_and_pinning():
    for file in FILES.values():
        text = file.read_text()
        if "cuda.Stream(" in text or "cuda.Event(" in text:
            assert file == PACKAGE / "transfer" / "lanes.py"
        if "cudaHostRegister" in text or "pin_memory" in text:
            assert file == PACKAGE / "host" / "pinned.py"


def test_rooms_say_who_lives_there():
    """Each package has a docstring or a README."""
    folders = {f.parent for name, f in FILES.items() if f.parent != PACKAGE}
    for folder in folders:
        said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert said or (folder / "README.md").is_file(), folder


def test_importing_the_package_touches_no_gpu_and_no_torch():
    code = (
        "import sys, megatrain_rl; assert 'torch' not in sys.modules; import megatrain_rl.trainer, torch; "
        "assert not torch.cuda.is_initialized(); assert 'verl' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
