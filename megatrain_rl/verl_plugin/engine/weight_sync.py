"""The trainer's weights as VERL's rollout engines want them: (HF name, tensor), one after the other.

Tensors are views of host blocks, which VERL's sender copies straight into its GPU bucket: the bucket is the only device
memory a sync needs. A tensor larger than the bucket goes as a CUDA IPC handle instead, so that one is put on the GPU
first; it is freed when VERL asks for the next. Called by engine.py.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatrain_rl.trainer import StreamTrainer


def stream_weights(trainer: StreamTrainer, *, device: str, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Waits for the optimizer layer by layer, as `StreamTrainer.named_parameters` does. bucket_bytes 0: unknown, so every tensor
    goes by way of the GPU."""
    for name, tensor in trainer.named_parameters():
        if device == "cuda" and tensor.nbytes > bucket_bytes:
            yield name, tensor.to(device=torch.device("cuda", torch.cuda.current_device()))
        else:
            yield name, tensor
