"""The one process that trains gets a process group without NCCL.

VERL opens `cpu:gloo,cuda:nccl` in every worker. Its barriers and the gathering of metrics would then build an NCCL
communicator. That takes half a gigabyte of the GPU for one process to talk to itself, outside torch's allocator and so
outside the budget. Used by engine.py.
"""

import torch.distributed as dist


def without_nccl() -> None:
    """Replace the default group by a gloo group, which serves CPU and CUDA tensors, if it has NCCL and one process.

    Nobody may have used or kept the group yet: NCCL builds its communicator with the first collective, and a device
    mesh of one dimension keeps the group.
    """
    if dist.get_world_size() > 1 or "nccl" not in dist.get_backend_config():
        return
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
