"""What a machine lets a process use: cgroups at every level, NUMA nodes, the shell's limits; on fake file trees."""

import os
import resource
from pathlib import Path

import pytest
from file_tree import tree

from megatrain_rl import planner
from megatrain_rl.host import machine

V2 = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
NONE_V1 = 9223372036854771712  # what version 1 says for no limit


def v1(controllers: str, top: str = "/") -> str:
    return f"31 20 0:27 {top} /sys/fs/cgroup/{controllers} rw shared:9 - cgroup cgroup rw,{controllers}"


def v2_level(place: str, **values: str | int) -> dict[str, str | int]:
    named = {
        "limit": "memory.max",
        "high": "memory.high",
        "used": "memory.current",
        "stat": "memory.stat",
        "cpu": "cpu.max",
    }
    return {f"sys/fs/cgroup{place}/{named[key]}": value for key, value in values.items()}


def v1_level(place: str, **values: str | int) -> dict[str, str | int]:
    named = {"limit": "memory.limit_in_bytes", "used": "memory.usage_in_bytes", "stat": "memory.stat"}
    return {f"sys/fs/cgroup/memory{place}/{named[key]}": value for key, value in values.items()}


def memory(root: Path) -> int:
    return min(machine.host_limits(root).values())


@pytest.fixture
def big(tmp_path) -> Path:
    """A machine with a terabyte."""
    return tree(tmp_path, {"proc/meminfo": f"MemTotal: 2000000000 kB\nMemAvailable:   {10**9} kB"})


def test_without_limits_it_is_what_the_kernel_calls_available(big):
    assert machine.host_limits(big) == {"the machine": 10**9 * 1024}
    assert machine.usable_cores(big) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("level", ["", "/job_1", "/job_1/step_0"])
def test_version_2_counts_at_every_level(big, level):
    """Wherever the limit is set, and file cache counts as room."""
    tree(big, {"proc/self/cgroup": "0::/job_1/step_0", "proc/self/mountinfo": V2})
    for place in ("", "/job_1", "/job_1/step_0"):
        tree(
            big,
            v2_level(
                place,
                limit="max",
                high="max",
                used=700,
                stat="anon 500\ninactive_file 150\nactive_file 50",
                cpu="max 100000",
            ),
        )
    assert memory(big) == 10**9 * 1024
    tree(big, v2_level(level, limit=1000, cpu="50000 100000"))
    assert memory(big) == 1000 - 700 + 200
    assert machine.usable_cores(big) == 1
    tree(big, v2_level(level, high=900))  # beyond it the kernel only takes back and slows down
    assert memory(big) == 900 - 700 + 200


def test_the_tightest_level_counts(big):
    tree(big, {"proc/self/cgroup": "0::/a/b", "proc/self/mountinfo": V2})
    tree(big, v2_level("/a/b", limit=10_000, used=1_000) | v2_level("/a", limit=12_000, used=11_500))
    assert memory(big) == 500, "others below /a use it too"
    tree(big, v2_level("/a", used=13_000))
    assert memory(big) == 0


@pytest.mark.parametrize("level", ["", "/slurm", "/slurm/uid_5/job_7"])
def test_version_1_as_slurm_sets_it_up(big, level):
    own = "/slurm/uid_5/job_7"
    tree(big, {
        "proc/self/cgroup": f"5:memory:{own}\n4:cpu,cpuacct:{own}\n1:name=systemd:/x",
        "proc/self/mountinfo": "\n".join([v1("memory"), v1("cpu,cpuacct")]),
    })  # fmt: skip
    for place in ("", "/slurm", "/slurm/uid_5", own):
        tree(
            big,
            v1_level(
                place,
                limit=NONE_V1,
                used=700,
                stat=f"cache 900\ntotal_inactive_file 100\ntotal_active_file 50\nhierarchical_memory_limit {NONE_V1}",
            ),
        )
        tree(
            big, {f"sys/fs/cgroup/cpu,cpuacct{place}/cpu.cfs_{k}_us": v for k, v in (("quota", -1), ("period", 100000))}
        )
    assert machine.host_limits(big) == {"the machine": 10**9 * 1024}
    assert machine.usable_cores(big) == len(os.sched_getaffinity(0))
    tree(big, v1_level(level, limit=1000) | {f"sys/fs/cgroup/cpu,cpuacct{level}/cpu.cfs_quota_us": 30000})
    assert memory(big) == 1000 - 700 + 150
    assert machine.usable_cores(big) == 1


def test_version_1_tells_of_levels_that_a_container_does_not_see(big):
    tree(big, {"proc/self/cgroup": "5:memory:/docker/abc", "proc/self/mountinfo": v1("memory", "/docker/abc")})
    tree(big, v1_level("", limit=NONE_V1, used=300, stat="hierarchical_memory_limit 1000"))
    assert memory(big) == 700


def test_both_versions_side_by_side(big):
    """systemd's hybrid layout: the controllers are on version 1, and version 2 is mounted beside them without any."""
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
    tree(big, {"proc/self/cgroup": "4:memory:/job\n0::/", "proc/self/mountinfo": "\n".join([v1("memory"), unified])})
    tree(big, {"sys/fs/cgroup/unified/cgroup.procs": 1} | v1_level("/job", limit=1000, used=600))
    assert memory(big) == 400


@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("/", "/"),  # a cgroup namespace of its own
        ("/../..", "/"),  # moved out of it
        ("/docker/abc", "/docker/abc"),  # a container that sees the host's names
        ("/docker/abc", "/../.."),  # mounted before the namespace was made
        ("/docker/abc", "/"),  # the host's names, and only the container's own files
    ],
)
def test_a_container_s_own_limit_is_at_its_top(big, path, mounted):
    tree(big, {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": V2.replace("0:26 /", f"0:26 {mounted}")})
    tree(big, v2_level("", limit=1000, used=100, cpu="100000 100000"))
    assert memory(big) == 900
    assert machine.usable_cores(big) == 1


def test_a_folder_with_odd_letters(big):
    mount = V2.replace("/sys/fs/cgroup", r"/my\040groups")
    tree(big, {"proc/self/cgroup": "0::/a:b c", "proc/self/mountinfo": mount})
    tree(big, {"my groups/a:b c/memory.max": 1000, "my groups/a:b c/memory.current": 10})
    assert memory(big) == 990


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "", "proc/self/mountinfo": ""},
        {"proc/self/cgroup": "nonsense\n::\n0::relative", "proc/self/mountinfo": "1 2 3\n - \n" + V2},
        {"proc/self/cgroup": "0::/gone", "proc/self/mountinfo": V2},
        {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2, "sys/fs/cgroup/memory.max": "many", "sys/fs/cgroup/memory.current": 5},
        {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2, "sys/fs/cgroup/cpu.max": "", "sys/fs/cgroup/memory.max": ""},
        {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2, "sys/fs/cgroup/cpu.max": "0 0", "sys/fs/cgroup/memory.max/a": 1},
        {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2, "sys/fs/cgroup/memory.max": 5},  # used is not told
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_nothing(big, files):
    tree(big, files)
    assert memory(big) == 10**9 * 1024
    assert machine.usable_cores(big) == len(os.sched_getaffinity(0))


def test_a_process_bound_to_some_nodes_has_their_memory_only(big):
    node = "sys/devices/system/node"
    figures = "Node 1 MemTotal: 9 kB\nNode 1 MemFree:   100 kB\nNode 1 Active(file): 20 kB\nNode 1 AnonPages: 7 kB"
    tree(
        big,
        {f"{node}/has_memory": "0-1", f"{node}/node1/meminfo": figures, "proc/self/status": "Mems_allowed_list:\t0-1"},
    )
    assert memory(big) == 10**9 * 1024
    tree(big, {"proc/self/status": "Mems_allowed_list:\t1"})
    assert machine.host_limits(big)["the NUMA nodes that it is bound to"] == 120 * 1024


def test_membind_counts_like_a_bound_process(big):
    """`numactl --membind=1`: beyond that node's memory the kernel kills the process."""
    node = "sys/devices/system/node"
    tree(big, {f"{node}/has_memory": "0-1", f"{node}/node1/meminfo": "Node 1 MemFree:   100 kB"})
    tree(big, {"proc/self/status": "Mems_allowed_list:\t0-1"})
    for policy, left in (("default", 10**9), ("interleave:0-1", 10**9), ("bind:0-1", 10**9), ("bind=static:1", 100)):
        tree(
            big,
            {"proc/self/numa_maps": f"0100 bind:0 file=/x N0=1\n0200 {policy} heap anon=4 N1=4 kernelpagesize_kB=4"},
        )
        assert memory(big) == left * 1024


def test_strict_overcommit_is_a_limit(big):
    with (big / "proc/meminfo").open("a") as meminfo:
        meminfo.write("CommitLimit: 1000 kB\nCommitted_AS: 900 kB\n")
    tree(big, {"proc/sys/vm/overcommit_memory": 1})
    assert memory(big) == 10**9 * 1024
    tree(big, {"proc/sys/vm/overcommit_memory": 2})
    assert memory(big) == 100 * 1024


def test_the_shell_s_limits_count(big, monkeypatch):
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: 5000 * 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    tree(big, {"proc/self/status": "VmSize:  9000 kB\nVmData:  1000 kB"})
    assert machine.host_limits(big)["ulimit -d"] == memory(big) == 4000 * 1024


def test_a_refusal_of_the_plan_says_who_sets_the_limit(monkeypatch):
    import tiny

    from megatrain_rl.config import AdamWConfig, StreamConfig
    from megatrain_rl.model.decoder import decoder_spec

    limits = {"the machine": 10**12, "cgroup /sys/fs/cgroup/job_7": 1000}
    monkeypatch.setattr(machine, "host_limits", lambda: limits)
    with pytest.raises(ValueError, match="host_budget_gb") as error:
        planner.make_plan(decoder_spec(tiny.config()), StreamConfig(), AdamWConfig(), reference=False)
    assert "cgroup /sys/fs/cgroup/job_7" in str(error.value)


def test_this_machine_has_some_memory_and_cores():
    assert machine.available_host_bytes() > 10**8
    assert 1 <= machine.usable_cores() <= len(os.sched_getaffinity(0))
