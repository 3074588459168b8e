"""What this machine, or the cgroup this process runs in, lets the process use."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores the scheduler may run this process on, or fewer if its cgroup has a quota.

    The default number of threads for work that has the machine to itself, such as torch's own operations. Threads are
    set on purpose: Ray starts its workers with OMP_NUM_THREADS=1, and a container sees all cores of its host.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _words("cpu.max")
    if quota and quota[0] != "max":
        cores = min(cores, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    return cores


def optimizer_threads() -> int:
    """Seven of every eight usable cores: the default threads of the host optimizer, which runs beside backward.

    The rest is for the thread that gives the GPU its work and the one that waits for what lands.
    """
    cores = usable_cores()
    return max(1, cores - cores // 8)


def available_host_bytes() -> int:
    """Memory this process may still take: what the kernel calls available, or less if its cgroup is smaller.

    Page cache counts as available in both: it is given back when it is needed.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.is_file() else []:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used, stat = _words("memory.max"), _words("memory.current"), _words("memory.stat")
    if limit and limit[0] != "max" and used:
        values = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
        cache = values.get("inactive_file", 0) + values.get("active_file", 0)
        available = min(available, int(limit[0]) - int(used[0]) + cache)
    return available


def _words(name: str) -> list[str]:
    file = _CGROUP / name
    return file.read_text().split() if file.is_file() else []
