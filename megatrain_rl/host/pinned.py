"""The only place that allocates large host memory, and the only place that pins it.

Memory is mapped pageable with huge pages asked for (fewer to pin and to look up; what the optimizer gains by them is
within noise), touched once, and registered with CUDA as one large region: about ten times faster than cudaHostAlloc
and without the power-of-two rounding of a caching allocator. Regions are unregistered when their owner closes them
(or is collected), before the memory goes.
"""

import contextlib
import ctypes
import logging
import mmap
import weakref

import torch
from torch import Tensor

log = logging.getLogger(__name__)
_warned = False


class HostRegion:
    """One zeroed host tensor, pinned when `pin` is set and the system allows it.

    `flat`: the tensor, one-dimensional. A refusal to pin is one warning for the process, and the region stays pageable:
    results are the same, copies several times slower and no longer asynchronous.
    """

    def __init__(self, numel: int, dtype: torch.dtype, *, pin: bool):
        self.flat: Tensor = _map(numel, dtype).zero_()
        self._unpin = weakref.finalize(self, _unregister, self.flat) if pin and numel and _register(self.flat) else None

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self.flat = torch.empty(0, dtype=self.flat.dtype)


def _map(numel: int, dtype: torch.dtype) -> Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    mapping = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them: small pages, the same content
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype)  # keeps the mapping alive


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


def _unregister(flat: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(flat.data_ptr())
