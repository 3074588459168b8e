"""The complete training state in a directory, written beside its final name, then renamed: a crash costs no older one.

    DIR/huggingface/                 what AutoModelForCausalLM loads (bf16: the high halves of the masters)
    DIR/optimizer/BLOCK.safetensors  exp_avg, exp_avg_sq and, for bf16 weights, the residual (the masters' low halves)
    DIR/trainer_state.json           step counts, recent norms, schedule, python's generator
    DIR/rng.safetensors              torch's and numpy's generators

Called by StreamTrainer with the optimizer at rest.
"""

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatrain_rl.host.store import HostStore, check_shapes, fill_from_checkpoint
from megatrain_rl.model.decoder import Block, DecoderSpec
from megatrain_rl.model.hf_io import CheckpointReader, write_checkpoint
from megatrain_rl.optim.host_adamw import HostAdamW

FORMAT = 2
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int16: "I16"}  # safetensors' own


def save(
    directory: Path,
    spec: DecoderSpec,
    store: HostStore,
    optimizer: HostAdamW | None,
    state: dict[str, Any],
    companions_of: Path | None,
) -> None:
    """Write everything to `DIRECTORY.tmp`, flush it to disk, and put it in the place of `directory`. An OSError before
    anything is written if the disk cannot hold it."""
    scratch = _beside(directory, "tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    _require_room(directory, spec, store, optimizer)
    named = ((block.names[n], store.view(block, n)) for block in spec.blocks for n in block.names)
    write_checkpoint(scratch / "huggingface", spec.config, named, companions_of)
    if optimizer is not None:
        (scratch / "optimizer").mkdir()
        for block in spec.blocks:
            file = scratch / "optimizer" / f"{block.name}.safetensors"
            save_file(optimizer.state[block.name].tensors(), file, metadata={"layout": _layout(block)})
    save_file(_rng_tensors(), scratch / "rng.safetensors")
    python_rng = random.getstate()
    everything = {"format": FORMAT, "python_rng": python_rng, **state}
    (scratch / "trainer_state.json").write_text(json.dumps(everything))
    _flush(scratch)
    old = _beside(directory, "old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.replace(directory, old)
    os.replace(scratch, directory)
    shutil.rmtree(old, ignore_errors=True)


def load(directory: Path, spec: DecoderSpec, store: HostStore, optimizer: HostAdamW | None) -> dict[str, Any]:
    """Restore what `save` wrote; returns its `state`. Everything is checked before anything is changed."""
    if not directory.exists() and _beside(directory, "old").exists():
        os.replace(_beside(directory, "old"), directory)  # a crash fell between the two renames of `save`
    state_file = directory / "trainer_state.json"
    if not state_file.is_file():
        raise ValueError(f"no checkpoint at {str(directory)!r}: trainer_state.json is missing")
    state = json.loads(state_file.read_text())
    if state["format"] != FORMAT:
        raise ValueError(f"checkpoint {str(directory)!r} has format {state['format']}, this version reads {FORMAT}")
    reader = CheckpointReader(directory / "huggingface")
    check_shapes(spec, reader)
    if optimizer is not None:
        _check_optimizer(directory, spec, optimizer)
    try:
        for block in spec.blocks:
            fill_from_checkpoint(block, store.begin_write(block), reader)
            if optimizer is not None:
                saved = load_file(directory / "optimizer" / f"{block.name}.safetensors")
                for name, tensor in optimizer.state[block.name].tensors().items():
                    tensor.copy_(saved[name])
            store.end_write(block)
    except BaseException as error:  # half restored: whoever reads the weights must hear of it
        store.fail(error)
        raise
    store.recovered()
    _restore_rng(directory, state["python_rng"])
    return state


def _require_room(directory: Path, spec: DecoderSpec, store: HostStore, optimizer: HostAdamW | None) -> None:
    needed = spec.num_parameters * store.dtype.itemsize
    if optimizer is not None:
        needed += sum(t.nbytes for block in spec.blocks for t in optimizer.state[block.name].tensors().values())
    total, _, free = shutil.disk_usage(directory.parent)
    if needed > free and total:  # some file systems over a network report 0 of 0
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free, nothing was written: make room, save elsewhere "
            "(trainer.default_local_dir) or keep fewer (trainer.max_actor_ckpt_to_keep)",
            str(directory),
        )


def _beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(f"{directory.name}.{suffix}")


def _check_optimizer(directory: Path, spec: DecoderSpec, optimizer: HostAdamW) -> None:
    for block in spec.blocks:
        file = directory / "optimizer" / f"{block.name}.safetensors"
        if not file.is_file():
            raise ValueError(
                f"checkpoint {str(directory)!r} has no optimizer state for {block.name}: {file.name} is missing"
            )
        with safe_open(file, framework="pt") as f:
            names, layout = f.keys(), f.metadata()["layout"]
            found = {name: f.get_slice(name).get_dtype() for name in names}
        wanted = {name: _DTYPE_NAMES[t.dtype] for name, t in optimizer.state[block.name].tensors().items()}
        if found != wanted:
            raise ValueError(
                f"checkpoint {str(directory)!r} was written with another param_dtype or optimizer_state_dtype: {block.name} has "
                f"{found}, this run needs {wanted}"
            )
        if layout != _layout(block):
            raise ValueError(
                f"checkpoint {str(directory)!r}: the optimizer state of {block.name} is laid out for other parameters (another "
                "model, or another version of transformers); resume with what wrote it"
            )


def _layout(block: Block) -> str:
    """Name, offset and shape of every parameter: optimizer state is flat, so its meaning is this."""
    return json.dumps([[name, slot.offset, slot.shape] for name, slot in block.layout.slots.items()])


def _rng_tensors() -> dict[str, Tensor]:
    generator = numpy.random.get_state(legacy=False)
    assert generator["bit_generator"] == "MT19937"
    mersenne = generator["state"]
    rest = [mersenne["pos"], generator["has_gauss"], generator["gauss"]]
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy_keys": torch.from_numpy(mersenne["key"].astype("int64")),
        "numpy_rest": torch.tensor(rest, dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def _restore_rng(directory: Path, python_rng: list) -> None:
    saved = load_file(directory / "rng.safetensors")
    torch.set_rng_state(saved["torch"])
    position, has_gauss, cached = saved["numpy_rest"].tolist()
    numpy.random.set_state(
        ("MT19937", saved["numpy_keys"].numpy().astype("uint32"), int(position), int(has_gauss), cached)
    )
    if "cuda" in saved and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(saved["cuda"])
    version, internal, gauss = python_rng
    random.setstate((version, tuple(internal), gauss))


def _flush(directory: Path) -> None:
    """Files and folders to disk before the rename, so that a power cut cannot leave a renamed but empty checkpoint."""
    for folder, _, files in os.walk(directory):
        for path in [Path(folder), *(Path(folder) / f for f in files)]:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
