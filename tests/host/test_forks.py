"""A forked child gets none of the state's memory, so that the parent does not pay for copies; and it is told so."""

import os
import re
from pathlib import Path

import pytest
import tiny
import torch
from torch.utils.data import DataLoader, Dataset

from megatrain_rl.host.pinned import HostRegion
from megatrain_rl.objectives import NegativeLogLikelihood

MIB = 1 << 20


def in_child(work) -> str:
    """What `work` returns in a forked child, or its error. The child must end by itself, not by a signal."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return said


def mapped(address: int) -> dict[str, str]:
    """What /proc/self/smaps says of the mapping that holds this address; empty if there is none."""
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        first, last = (int(end, 16) for end in part.split(" ", 1)[0].split("-"))
        if first <= address < last:
            return dict(re.findall(r"(?m)^(\w+):\s*(.*?)\s*$", part))
    return {}


def test_what_is_written_while_a_child_lives_is_not_copied():
    """Both processes together have the memory once."""
    region = HostRegion(64 * MIB, torch.uint8, pin=False)
    address = region.flat.data_ptr() + 32 * MIB
    assert "dc" in mapped(address)["VmFlags"].split()  # "do not copy on fork"
    said = in_child(lambda: (mapped(address) != {}, region.flat.numel()))
    assert said == f"(False, {64 * MIB})"
    assert (region.flat == 0).all()


def test_a_child_does_not_unmap_what_it_has_put_in_the_same_place():
    """The addresses are free in the child: other memory may come to lie there before the tensors' owners go."""
    held = [HostRegion(16 * MIB, torch.uint8, pin=False)]
    address = held[0].flat.data_ptr()

    def reuse() -> str:
        import ctypes
        import mmap

        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
        size = ctypes.c_size_t(16 * MIB)
        placed = libc.mmap(
            ctypes.c_void_p(address), size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0)
        )
        assert placed == address
        ctypes.memset(address, 7, 16 * MIB)
        held.clear()
        return str(bytes((ctypes.c_ubyte * 3).from_address(address)))

    assert in_child(reuse) == str(b"\7\7\7")


@pytest.fixture
def trainer(tmp_path):
    made = tiny.trainer(tiny.saved(tiny.model(tiny.config(layers=2)), tmp_path / "model"))
    packs = tiny.packs(tiny.sequences())
    made.forward_backward(packs, NegativeLogLikelihood(packs))
    yield made
    made.close()


def test_a_trainer_refuses_in_a_child_and_goes_on_in_its_process(trainer, tmp_path):
    packs = tiny.packs(tiny.sequences())
    uses = {
        "forward_backward": lambda: trainer.forward_backward(packs, NegativeLogLikelihood(packs)),
        "log_probs": lambda: trainer.log_probs(packs),
        "optim_step": trainer.optim_step,
        "zero_grad": trainer.zero_grad,
        "named_parameters": lambda: list(trainer.named_parameters()),
        "named_gradients": lambda: list(trainer.named_gradients()),
        "load_named_parameters": lambda: trainer.load_named_parameters([]),
        "save_checkpoint": lambda: trainer.save_checkpoint(tmp_path / "saved"),
        "load_checkpoint": lambda: trainer.load_checkpoint(tmp_path / "saved"),
        "synchronize": trainer.synchronize,
        "warm_up": trainer.warm_up,
    }
    for name, use in uses.items():
        said = in_child(use)
        assert said.startswith("ValueError") and "forked child" in said, (name, said)
    assert in_child(trainer.close) == "None"
    assert trainer.optim_step().stepped
    assert len(trainer.log_probs(packs)) == len(packs)


class Rows(Dataset):
    """A data set of a user who reads weights in it."""

    def __init__(self, trainer):
        self.trainer = trainer

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return next(iter(self.trainer.named_parameters()))[1].sum()


def test_a_data_loader_s_worker_is_told(trainer):
    with pytest.raises(ValueError, match="forked child"):
        next(iter(DataLoader(Rows(trainer), num_workers=1, multiprocessing_context="fork")))
