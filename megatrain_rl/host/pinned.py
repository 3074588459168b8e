"""The only place that allocates large host memory, and the only place that pins it.

Memory is mapped pageable with huge pages asked for (fewer to pin and to look up; what the optimizer gains by them is
within noise), touched once, and registered with CUDA as one large region: about ten times faster than cudaHostAlloc
and without the power-of-two rounding of a caching allocator. Regions are unregistered when their owner closes them
(or is collected), before the memory goes.

A forked child does not get this memory. It would share the pages until the optimizer writes them, and then cost a copy
of each; pinned ones the kernel copies at the fork. So who reads a region in a child crashes; `lifetime.py` keeps users
from it.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import weakref

import torch
from torch import Tensor

from megatrain_rl.host import numa

log = logging.getLogger(__name__)
_warned = False
_interleaved = False
_mappings: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()


class HostRegion:
    """One zeroed host tensor, pinned when `pin` is set and the system allows it.

    `flat`: the tensor, one-dimensional. A refusal to pin is one warning for the process, and the region stays pageable:
    results are the same, copies several times slower and no longer asynchronous.
    """

    def __init__(self, numel: int, dtype: torch.dtype, *, pin: bool):
        self.flat: Tensor = _map(numel, dtype).zero_()
        self._unpin = None
        if pin and numel and _register(self.flat):
            self._unpin = weakref.finalize(self, _unregister, self.flat, os.getpid())

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self.flat = torch.empty(0, dtype=self.flat.dtype)


def place_memory(host_numa: str) -> None:
    """Place what this process allocates from now on as `config.host_numa` says. A ValueError where it cannot be."""
    global _interleaved
    if host_numa == "interleave":
        numa.require_interleave()
    _interleaved = host_numa == "interleave"


def where_memory_lies() -> str | None:
    """A line that says how many bytes of all regions lie on which NUMA node; None on a machine of one node."""
    nodes = numa.allowed_nodes()
    if len(nodes) < 2:
        return None
    found = numa.placement((address, address + len(m)) for m in list(_mappings) for address in [_address(m)])
    parts = ", ".join(f"node {node} {found.get(node, 0) / 1e9:.1f} GB" for node in sorted({*nodes, *found}))
    how = "interleave" if _interleaved else "default; interleave deals pages out to all nodes in turn"
    return f"host memory by NUMA node: {parts} (host_numa={how})"


def _map(numel: int, dtype: torch.dtype) -> Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    num_bytes = numel * dtype.itemsize
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # limits that MemAvailable knows nothing of
        raise ValueError(
            f"the system refuses {num_bytes / 1e9:.1f} GB of host memory ({error}): raise the limits of this process "
            "(ulimit -v, ulimit -d, vm.overcommit_memory), or lower host_budget_gb"
        ) from error
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with contextlib.suppress(OSError):  # a kernel that does not take it: the same content, slower or larger
            mapping.madvise(advice)
    if _interleaved:
        numa.interleave(_address(mapping), num_bytes)
    _mappings.add(mapping)
    return torch.frombuffer(mapping, dtype=dtype)  # keeps the mapping alive


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _leave_alone_in_child() -> None:
    """In a forked child the addresses of regions are free for other memory, so nothing may unmap them there."""
    for mapping in list(_mappings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_leave_alone_in_child)


def _register(flat: Tensor) -> bool:
    global _warned
    status = torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)
    if int(status) == 0:
        return True
    _forget_cuda_error()
    if not _warned:
        _warned = True
        log.warning(
            "pinning %.1f GB of host memory was refused (CUDA error %d); continuing with pageable memory: weights and gradients "
            "will cross the link several times slower. Raise the locked-memory limit (ulimit -l) to mend it.",
            flat.nbytes / 1e9,
            int(status),
        )
    return False


def _forget_cuda_error() -> None:
    """Clear the thread's last CUDA error: a refused call leaves its own there, and the next launch would report it."""
    assert torch.version.cuda is not None  # the refusal came from CUDA
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")  # the one torch has loaded
    runtime.cudaGetLastError()


def _unregister(flat: Tensor, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has neither the memory nor CUDA
        torch.cuda.cudart().cudaHostUnregister(flat.data_ptr())
