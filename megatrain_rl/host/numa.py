"""NUMA nodes: how much memory of which node this process may use, where its regions lie, and how they get there.

A machine with several processor sockets has memory at each. The kernel puts a page at the socket of the thread that
touches it first, so large regions fill one node and then the next, and one memory controller does most of the work.
`interleave` deals pages out to all nodes in turn. pinned.py asks for it; `config.host_numa` chooses. `root` stands for
/ in tests.
"""

import contextlib
import ctypes
import mmap
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

_NODES = Path("sys/devices/system/node")
# The number of the system call mbind. glibc has no function for it and libnuma may not be installed.
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_INTERLEAVE = 3


def allowed_nodes(root: Path = Path("/")) -> list[int]:
    """Nodes that have memory which this process may use; none where the kernel knows of no nodes."""
    return sorted(_listed(root / _NODES / "has_memory") & _allowed(root))


def room(root: Path = Path("/")) -> int | None:
    """Bytes free or in file cache on the nodes that this process may use; None where it may use all that there are."""
    nodes = _listed(root / _NODES / "has_memory")
    mine = nodes & _allowed(root)
    if len(mine) > 1:
        mine &= _bound(root) or mine
    if not mine or mine == nodes:
        return None
    free = 0
    for node in mine:
        figures = dict(re.findall(r"Node \d+ ([\w()]+):\s+(\d+) kB", _text(root / _NODES / f"node{node}/meminfo")))
        kinds = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
        free += 1024 * sum(int(figures.get(kind, 0)) for kind in kinds)
    return free


def require_interleave() -> None:
    """Try it on one page; raises as `interleave` does."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    interleave(address, mmap.PAGESIZE)


def socket_nodes(root: Path = Path("/")) -> list[int]:
    """The allowed nodes that have cores: some machines show the memory of their GPUs as nodes without any."""
    with_cores = _listed(root / _NODES / "has_cpu")
    return [node for node in allowed_nodes(root) if node in with_cores]


def interleave(address: int, num_bytes: int) -> None:
    """Deal the pages of a mapping that nobody has touched yet out to the socket nodes in turn. A ValueError that names
    the setting where that cannot be had."""
    number, nodes = _MBIND.get(platform.machine()), socket_nodes()
    if number is None or not nodes:
        raise ValueError("host_numa=interleave: this system shows no NUMA nodes; set host_numa=default")
    bits = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        bits[node // 64] |= 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    # the kernel looks at one bit less than it is told of
    arguments = (
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_long(_MPOL_INTERLEAVE),
    )
    if libc.syscall(*arguments, bits, ctypes.c_ulong(64 * len(bits) + 1), ctypes.c_long(0)):
        raise ValueError(
            f"host_numa=interleave: the system refuses it ({os.strerror(ctypes.get_errno())}); in a container add the "
            "capability SYS_NICE, or set host_numa=default and start under `numactl --interleave=all`"
        )


def placement(ranges: Iterable[tuple[int, int]], root: Path = Path("/")) -> dict[int, int]:
    """Bytes on each node of the regions that are given as (first address, past the last).

    The kernel joins neighbours into one mapping, so a mapping belongs to the region that it begins in.
    """
    ranges = list(ranges)
    found: dict[int, int] = {}
    for line in _text(root / "proc/self/numa_maps").splitlines():
        start = int(line.split(" ", 1)[0], 16)
        if not any(first <= start < end for first, end in ranges):
            continue
        size = re.search(r"kernelpagesize_kB=(\d+)", line)
        for node, pages in re.findall(r" N(\d+)=(\d+)", line):
            kib = int(pages) * (int(size[1]) if size else mmap.PAGESIZE // 1024)
            found[int(node)] = found.get(int(node), 0) + 1024 * kib
    return found


def _allowed(root: Path) -> set[int]:
    found = re.search(r"^Mems_allowed_list:\s*(\S+)", _text(root / "proc/self/status"), re.MULTILINE)
    return _numbers(found[1]) if found else set()


def _bound(root: Path) -> set[int]:
    """The nodes that `numactl --membind` has bound this process to; none without it. The heap shows the policy."""
    found = re.search(r"^\w+ bind\S*:([\d,-]+) .*\bheap\b", _text(root / "proc/self/numa_maps"), re.MULTILINE)
    return _numbers(found[1]) if found else set()


def _listed(file: Path) -> set[int]:
    return _numbers(_text(file).strip())


def _numbers(text: str) -> set[int]:
    """The numbers of a list like 0-1,4."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):  # a kernel without NUMA
        return file.read_text()
    return ""
