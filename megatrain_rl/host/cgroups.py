"""The limits of the cgroups that this process is in, version 1 and 2, at every level from its own to the top.

Slurm, systemd and Kubernetes each set their limits at a level of their own, and each holds for all that lies below it.
A process in a container may see only a part of the levels; what it sees is looked at. What cannot be read says nothing.
`root` stands for / in tests. Used by machine.py.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 says "none" as the largest number of whole pages.
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class _Hierarchy:
    """A mounted tree of cgroups. controllers: of version 1; None for the one tree of version 2. top: of what is
    mounted, as /proc/self/cgroup names it. mount: where it is mounted."""

    controllers: frozenset[str] | None
    top: PurePosixPath
    mount: Path


def memory_rooms(root: Path = Path("/")) -> dict[str, int]:
    """Bytes that each cgroup with a limit still lets this process take, by the cgroup's folder.

    File cache counts as room: it is given back when it is needed. So does `memory.high` of version 2 as a limit: above
    it the kernel takes memory back and slows the process down, and pinned memory cannot be taken.
    """
    rooms = {}
    for version, level in _levels("memory", root):
        statistics = _statistics(level / "memory.stat")
        if version == 2:
            limits = [_number(level / name) for name in ("memory.max", "memory.high")]
            used = _number(level / "memory.current")
            cache = statistics.get("inactive_file", 0) + statistics.get("active_file", 0)
        else:
            # the second one also knows of levels above the top that is mounted here
            limits = [_number(level / "memory.limit_in_bytes"), statistics.get("hierarchical_memory_limit")]
            used = _number(level / "memory.usage_in_bytes")
            cache = statistics.get("total_inactive_file", 0) + statistics.get("total_active_file", 0)
        known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
        if known and used is not None:
            rooms[str(level)] = max(0, min(known) - used + cache)
    return rooms


def cores(root: Path = Path("/")) -> float | None:
    """Cores that the tightest quota of time amounts to; None without a quota."""
    found = []
    for version, level in _levels("cpu", root):
        if version == 2:
            quota, period = (*_words(level / "cpu.max"), "", "")[:2]
        else:
            quota, period = (" ".join(_words(level / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):  # "max" and -1 are no quotas
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _levels(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of every cgroup of this process that may limit what `controller` counts."""
    paths = _own_paths(root)
    for tree in _hierarchies(root):
        version = 2 if tree.controllers is None else 1
        if version == 1 and controller not in (tree.controllers or ()):
            continue
        path = paths.get("" if version == 2 else controller)
        if path is None:
            continue
        level = tree.mount / _below(path, tree.top)
        for folder in (level, *level.parents):
            yield version, folder
            if folder == tree.mount:
                break


def _own_paths(root: Path) -> dict[str, PurePosixPath]:
    """The cgroup of this process in each hierarchy, by controller; "" is version 2."""
    found: dict[str, PurePosixPath] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found |= {controller: PurePosixPath(path) for controller in controllers.split(",") if path.startswith("/")}
    return found


def _hierarchies(root: Path) -> Iterator[_Hierarchy]:
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, _, source = line.partition(" - ")
        place, kind = mounted.split(" "), source.split(" ")
        if len(place) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        top, mount = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), text) for text in place[3:5])
        controllers = None if kind[0] == "cgroup2" else frozenset(kind[2].split(","))
        yield _Hierarchy(controllers, PurePosixPath(top), root / mount.lstrip("/"))


def _below(path: PurePosixPath, top: PurePosixPath) -> PurePosixPath:
    """`path` as seen from `top`; where a namespace hides how the two lie, `top` itself."""
    if ".." not in path.parts and path.is_relative_to(top):
        return path.relative_to(top)
    return PurePosixPath()


def _lines(file: Path) -> list[str]:
    with contextlib.suppress(OSError):  # not there, not ours to read, or of a cgroup that has just gone
        return file.read_text(errors="replace").splitlines()
    return []


def _words(file: Path) -> list[str]:
    return [word for line in _lines(file) for word in line.split()]


def _number(file: Path) -> int | None:
    """None also for "max"."""
    words = _words(file)
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() else None


def _statistics(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(file))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
