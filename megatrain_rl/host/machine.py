"""What this machine, and every limit that is set on this process, lets the process use.

`root` stands for / in tests.
"""

import math
import os
import re
import resource
from pathlib import Path

from megatrain_rl.host import cgroups, numa

_MACHINE = "the machine"


def usable_cores(root: Path = Path("/")) -> int:
    """Cores the scheduler may run this process on, or fewer if a cgroup that it is in has a quota.

    The default number of threads for work that has the machine to itself, such as torch's own operations. Threads are
    set on purpose: Ray starts its workers with OMP_NUM_THREADS=1, and a container sees all cores of its host.
    """
    usable = len(os.sched_getaffinity(0))
    quota = cgroups.cores(root)
    return usable if quota is None else min(usable, max(1, math.ceil(quota)))


def optimizer_threads() -> int:
    """Seven of every eight usable cores: the default threads of the host optimizer, which runs beside backward.

    The rest is for the thread that gives the GPU its work and the one that waits for what lands.
    """
    cores = usable_cores()
    return max(1, cores - cores // 8)


def available_host_bytes() -> int:
    """Memory this process may still take: the least of `host_limits`."""
    return min(host_limits().values())


def tightest_limit() -> str | None:
    """Who says how much memory this process may take; None if it is the machine itself."""
    limits = host_limits()
    name = min(limits, key=lambda each: limits[each])
    return None if name == _MACHINE else name


def host_limits(root: Path = Path("/")) -> dict[str, int]:
    """Bytes this process may still take, by who says so: the kernel, each cgroup, NUMA nodes, the limits of its shell.

    File cache counts as available: it is given back when it is needed.
    """
    memory = _sizes(root / "proc/meminfo")
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    limits = {_MACHINE: memory.get("MemAvailable", free)}
    limits |= {f"cgroup {folder}": left for folder, left in cgroups.memory_rooms(root).items()}
    on_nodes = numa.room(root)
    if on_nodes is not None:
        limits["the NUMA nodes that it is bound to"] = on_nodes
    overcommit = root / "proc/sys/vm/overcommit_memory"
    if overcommit.is_file() and overcommit.read_text().strip() == "2":  # every byte mapped counts, touched or not
        limits["vm.overcommit_memory=2"] = max(0, memory["CommitLimit"] - memory["Committed_AS"])
    used = _sizes(root / "proc/self/status")
    for option, kind, name in (("-v", resource.RLIMIT_AS, "VmSize"), ("-d", resource.RLIMIT_DATA, "VmData")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and name in used:
            limits[f"ulimit {option}"] = max(0, limit - used[name])
    return limits


def _sizes(file: Path) -> dict[str, int]:
    """Bytes by name of a file of the kernel's with lines like `Name:  5 kB`."""
    text = file.read_text() if file.is_file() else ""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s*(\d+) kB$", text, re.MULTILINE)}
