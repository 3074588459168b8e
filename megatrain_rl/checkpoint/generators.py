"""The generators of Python, numpy and torch are written down, checked on spare ones, and put in place.

A checkpoint has Python's in its JSON file and the others in a file of tensors. Called by training_state.py.
"""

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file

from megatrain_rl.model.hf_io import open_safetensors

_CPU = ("torch", "numpy_keys", "numpy_rest")


def python_state() -> Any:
    """The state of Python's generator, as JSON keeps it."""
    return random.getstate()


def write(file: Path) -> None:
    """Write the states of numpy's and torch's generators, CUDA's too where it is in use."""
    generator = numpy.random.get_state(legacy=False)
    assert generator["bit_generator"] == "MT19937"
    mersenne = generator["state"]
    rest = [mersenne["pos"], generator["has_gauss"], generator["gauss"]]
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(mersenne["key"].astype("int64")),
        "numpy_rest": torch.tensor(rest, dtype=torch.float64),
    }
    if _cuda_in_use():
        tensors["cuda"] = torch.cuda.get_rng_state()
    save_file(tensors, file)


class Generators:
    """States that were read and that generators accept. A ValueError names the file and the state that none accepts."""

    def __init__(self, file: Path, python: list, python_file: Path):
        if not file.is_file():
            raise ValueError(f"{file} is missing: the checkpoint is not complete")
        opened = open_safetensors(file)
        missing = set(_CPU) - set(opened.keys())
        if missing:
            raise ValueError(f"{file} has no {min(missing)}: it is damaged")
        self._tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        self._python = python
        trials = [
            ("python_rng", python_file, lambda: self._set_python(random.Random())),
            ("the state of torch's generator", file, lambda: torch.Generator().set_state(self._tensors["torch"])),
            ("the state of numpy's generator", file, lambda: self._set_numpy(numpy.random.RandomState())),
        ]
        if self._has_cuda():
            spare = torch.Generator(device="cuda")
            trials.append(("the state of CUDA's generator", file, lambda: spare.set_state(self._tensors["cuda"])))
        for what, place, trial in trials:
            try:
                trial()
            except (TypeError, ValueError, IndexError, OverflowError, RuntimeError) as error:
                raise ValueError(f"{place} is damaged: {what} cannot be set ({error})") from error

    def restore(self) -> None:
        """Put all of them in place."""
        torch.set_rng_state(self._tensors["torch"])
        self._set_numpy(numpy.random)
        if self._has_cuda():
            torch.cuda.set_rng_state(self._tensors["cuda"])
        self._set_python(random)

    def _has_cuda(self) -> bool:
        return "cuda" in self._tensors and _cuda_in_use()

    def _set_numpy(self, target: Any) -> None:
        position, has_gauss, cached = self._tensors["numpy_rest"].tolist()
        keys = self._tensors["numpy_keys"].numpy()
        if keys.min() < 0 or keys.max() >= 1 << 32:
            raise ValueError("a word is not of 32 bits")
        target.set_state(("MT19937", keys.astype("uint32"), int(position), int(has_gauss), cached))

    def _set_python(self, target: Any) -> None:
        version, internal, gauss = self._python
        target.setstate((version, tuple(internal), gauss))


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
