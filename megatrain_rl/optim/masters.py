"""Masters: the policy's parameters as they are trained, written from a checkpoint, at random, or one by one.

A bf16 weight is the high half of an fp32 master whose low half is the optimizer's residual; the two must be written
together, or the residual of an earlier weight would come back with the next update. Without an optimizer, or with fp32
weights, the weight is all there is.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatrain_rl.host.store import HostStore, copy_rounded
from megatrain_rl.model.decoder import Block
from megatrain_rl.model.folder import check_finite, check_shape
from megatrain_rl.model.hf_io import CheckpointReader
from megatrain_rl.ops.adamw import split_master
from megatrain_rl.optim.host_adamw import HostAdamW


def write_master(store: HostStore, optimizer: HostAdamW | None, block: Block, name: str, tensor: Tensor) -> None:
    """Set one parameter of `block`, of the right shape; with a residual fp32 values stay exact."""
    place = store.view(block, name)
    residual_flat = None if optimizer is None else optimizer.state[block.name].residual
    if residual_flat is None:
        copy_rounded(place, tensor)
        return
    residual = block.layout.view(residual_flat, name)
    if tensor.dtype == torch.bfloat16:
        place.copy_(tensor)
        residual.zero_()
    else:
        split_master(tensor.float(), place, residual)


def write_masters(store: HostStore, optimizer: HostAdamW | None, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Set parameters by Hugging Face name.

    All are looked at before the first is written, so `tensors` are held together in memory if they are made one by one.
    An unknown or repeated name, a wrong shape, and values that are no numbers are a ValueError.
    """
    places = {block.names[n]: (block, n) for block in store.spec.blocks for n in block.names}
    given: dict[str, Tensor] = {}
    for full_name, tensor in tensors:
        if full_name not in places:
            raise ValueError(f"{full_name!r} is not a parameter of this model")
        if full_name in given:
            raise ValueError(f"{full_name!r} was given twice")
        if not tensor.is_floating_point():
            raise ValueError(f"tensor {full_name!r} has dtype {tensor.dtype}: weights are floating-point numbers")
        check_shape(*places[full_name], tuple(tensor.shape))
        check_finite(tensor, f"tensor {full_name!r}")
        given[full_name] = tensor
    for full_name, tensor in given.items():
        write_master(store, optimizer, *places[full_name], tensor)


def read_masters(store: HostStore, optimizer: HostAdamW | None, reader: CheckpointReader) -> None:
    """Set every parameter from a model's folder. Values that are no numbers are a ValueError."""
    for block in store.spec.blocks:
        for name in block.layout.slots:
            tensor = reader.tensor(block.names[name])
            check_finite(tensor, reader.place(block.names[name]))
            write_master(store, optimizer, block, name, tensor)


def draw_masters(
    store: HostStore, optimizer: HostAdamW | None, *, std: float, seed: int, device: str | torch.device
) -> None:
    """Set every parameter at random: matrices normal with deviation `std`, norm weights 1, biases 0. The numbers depend
    on the device they are drawn on."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for block in store.spec.blocks:
        for name, slot in block.layout.slots.items():
            if len(slot.shape) == 2:
                draw = torch.empty(slot.shape, dtype=store.dtype, device=device)
                tensor = draw.normal_(std=std, generator=generator).cpu()
            else:
                tensor = torch.zeros(slot.shape) if name.endswith("bias") else torch.ones(slot.shape)
            write_master(store, optimizer, block, name, tensor)
