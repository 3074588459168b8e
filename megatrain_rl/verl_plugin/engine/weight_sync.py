"""The trainer's weights as VERL's rollout engines take them: (HF name, tensor), one after the other.

Tensors are views of host blocks, and VERL's sender copies them straight into its GPU bucket: the bucket is the only
device memory that a weight sync needs. A tensor larger than the bucket is sent as a CUDA IPC handle instead, so it is
put on the GPU first; it is freed when VERL asks for the next. Called by engine.py.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatrain_rl.trainer import StreamTrainer


def stream_weights(trainer: StreamTrainer, *, device: str, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter. The optimizer is waited for layer by layer, as in `StreamTrainer.named_parameters`.

    bucket_bytes: the size of VERL's bucket. 0 means unknown, and then every tensor is sent by way of the GPU.
    """
    for name, tensor in trainer.named_parameters():
        if device == "cuda" and tensor.nbytes > bucket_bytes:
            yield name, tensor.to(device=torch.device("cuda", torch.cuda.current_device()))
        else:
            yield name, tensor
