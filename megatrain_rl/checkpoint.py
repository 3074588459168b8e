"""The complete training state in a directory, written beside its final name, then renamed: a crash costs no older one.

    DIR/huggingface/                 what AutoModelForCausalLM loads (bf16: the high halves of the masters)
    DIR/optimizer/BLOCK.safetensors  exp_avg, exp_avg_sq and, for bf16 weights, the residual (the masters' low halves)
    DIR/trainer_state.json           step counts, recent norms, schedule, python's generator
    DIR/rng.safetensors              torch's and numpy's generators
    DIR/.megatrain_checkpoint        an empty file: the folder may be replaced and removed

Called by StreamTrainer with the optimizer at rest.
"""

import errno
import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatrain_rl.host.store import HostStore, fill_from_checkpoint
from megatrain_rl.model.decoder import Block, DecoderSpec
from megatrain_rl.model.folder import check_finite, check_folder
from megatrain_rl.model.hf_export import Companions, write_checkpoint
from megatrain_rl.model.hf_io import CheckpointReader, open_safetensors, read_json
from megatrain_rl.optim.host_adamw import HostAdamW

FORMAT = 2
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int16: "I16"}  # safetensors' own
# This file marks a folder as ours, also one that is not complete yet.
MARKER = ".megatrain_checkpoint"
_STATE, _RNG, _MODEL, _OPTIMIZER = "trainer_state.json", "rng.safetensors", "huggingface", "optimizer"
_OWN = (MARKER, _STATE, _RNG, _MODEL, _OPTIMIZER)


def save(
    directory: Path,
    spec: DecoderSpec,
    store: HostStore,
    optimizer: HostAdamW | None,
    state: dict[str, Any],
    companions: Companions,
) -> None:
    """Write everything to `DIRECTORY.tmp`, flush it to disk, and put it in the place of `directory`.

    Only a checkpoint is replaced, and files that others put beside it stay. A FileExistsError before anything is
    written if something else is in the way, an OSError if the disk cannot hold the checkpoint.
    """
    scratch, old = _beside(directory, "tmp"), _beside(directory, "old")
    for path in (directory, scratch, old):
        _require_replaceable(path)
    recover(directory)
    remove(scratch)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    _require_room(directory, spec, store, optimizer)
    scratch.mkdir()
    (scratch / MARKER).touch()
    named = ((block.names[n], store.view(block, n)) for block in spec.blocks for n in block.names)
    write_checkpoint(scratch / _MODEL, spec.config, named, companions)
    if optimizer is not None:
        (scratch / _OPTIMIZER).mkdir()
        for block in spec.blocks:
            metadata = {"layout": _layout(block)}
            save_file(optimizer.state[block.name].tensors(), scratch / _state_file(block), metadata=metadata)
    save_file(_rng_tensors(), scratch / _RNG)
    everything = {"format": FORMAT, "python_rng": random.getstate(), **state}
    (scratch / _STATE).write_text(json.dumps(everything))
    _flush(scratch)
    remove(old)
    if directory.exists():
        os.replace(directory, old)
    os.replace(scratch, directory)
    _keep_others(old, directory)
    remove(old)


def check(directory: Path, spec: DecoderSpec, optimizer: HostAdamW | None) -> "Checked":
    """Check everything that `save` wrote, and change nothing; what is returned restores it.

    So every file is read twice. A ValueError names the file that is missing, damaged, of another model or of another
    dtype, or has values that are no numbers.
    """
    recover(directory)
    state_file = directory / _STATE
    if not state_file.is_file():
        raise ValueError(f"no checkpoint at {str(directory)!r}: {_STATE} is missing")
    state = _read_state(state_file, trains=optimizer is not None)
    reader = CheckpointReader(directory / _MODEL)
    check_folder(spec, reader)
    for block in spec.blocks:
        for name in block.names.values():
            check_finite(reader.tensor(name), reader.place(name))
        if optimizer is not None:
            _check_optimizer(directory, block, optimizer)
    return Checked(directory, spec, reader, state, _read_rng(directory / _RNG))


@dataclass(frozen=True)
class Checked:
    """A checkpoint that was found whole."""

    directory: Path
    spec: DecoderSpec
    reader: CheckpointReader
    state: dict[str, Any]
    rng: dict[str, Tensor]

    def restore(self, store: HostStore, optimizer: HostAdamW | None) -> dict[str, Any]:
        """Put the weights, the optimizer's state and the generators in place; returns the `state` of `save`."""
        try:
            for block in self.spec.blocks:
                fill_from_checkpoint(block, store.begin_write(block), self.reader)
                if optimizer is not None:
                    saved = load_file(self.directory / _state_file(block))
                    for name, tensor in optimizer.state[block.name].tensors().items():
                        tensor.copy_(saved[name])
                store.end_write(block)
        except BaseException as error:  # half restored: whoever reads the weights must hear of it
            store.fail(error)
            raise
        store.recovered()
        _restore_rng(self.rng, self.state["python_rng"])
        return self.state


def recover(directory: Path) -> None:
    """Put a checkpoint back into its place if `save` ended between its two renames."""
    old = _beside(directory, "old")
    if not directory.exists() and is_complete(old):
        os.replace(old, directory)


def is_complete(path: Path) -> bool:
    """Whether `path` is a folder with a whole checkpoint of ours. A link is not."""
    return not path.is_symlink() and (path / _STATE).is_file()


def is_ours(path: Path) -> bool:
    """Whether `path` is a folder that `save` has written or begun to write. A link is not."""
    if path.is_symlink() or not path.is_dir():
        return False
    if (path / MARKER).is_file():
        return True
    try:  # a checkpoint of a version that made no marker
        return "format" in json.loads((path / _STATE).read_text())
    except (OSError, ValueError, TypeError):
        return False


def remove(path: Path) -> None:
    """Delete a folder that is ours, or empty. What is not there is no error."""
    if is_ours(path):
        shutil.rmtree(path)
    elif path.is_dir() and not path.is_symlink():
        path.rmdir()  # an OSError unless it is empty


def _require_replaceable(path: Path) -> None:
    there = path.exists() or path.is_symlink()
    empty = there and path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if there and not empty and not is_ours(path):
        raise FileExistsError(
            errno.EEXIST,
            "this is no checkpoint of megatrain_rl, so it is not replaced and nothing was written: move it away, or save "
            "elsewhere (trainer.default_local_dir)",
            str(path),
        )


def _keep_others(old: Path, directory: Path) -> None:
    """Move what others have put into the replaced checkpoint to the new one."""
    for entry in old.iterdir() if old.is_dir() else ():
        if entry.name not in _OWN and not (directory / entry.name).exists():
            os.replace(entry, directory / entry.name)


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


def _state_file(block: Block) -> str:
    return f"{_OPTIMIZER}/{block.name}.safetensors"


def _read_state(file: Path, *, trains: bool) -> dict[str, Any]:
    state = read_json(file)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {str(file.parent)!r} has format {state.get('format')}, this version reads {FORMAT}"
        )
    kinds: dict[str, type] = {"python_rng": list, "skipped_steps": int}
    if trains:
        kinds |= {"step_count": int, "recent_norms": list, "schedule": dict}
    for key, kind in kinds.items():
        if not isinstance(state.get(key), kind):
            raise ValueError(
                f"{file} has no {key} to go on from: it is damaged, or the checkpoint is of a run that did not train"
            )
    return state


def _check_optimizer(directory: Path, block: Block, optimizer: HostAdamW) -> None:
    file = directory / _state_file(block)
    if not file.is_file():
        raise ValueError(
            f"checkpoint {str(directory)!r} has no optimizer state for {block.name}: {file.name} is missing"
        )
    opened = open_safetensors(file)
    wanted = {name: _kind(t.dtype, t.shape) for name, t in optimizer.state[block.name].tensors().items()}
    found = {name: (opened.get_slice(name).get_dtype(), *opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    if (opened.metadata() or {}).get("layout") != _layout(block):
        raise ValueError(
            f"checkpoint {str(directory)!r}: the optimizer state of {block.name} is laid out for other parameters (another "
            "model, or another version of transformers); resume with what wrote it"
        )
    if found != wanted:
        raise ValueError(
            f"checkpoint {str(directory)!r} was written with another param_dtype or optimizer_state_dtype: {block.name} has "
            f"{found}, this run needs {wanted}"
        )
    for name in wanted:
        check_finite(opened.get_tensor(name), f"{file}: {name}")


def _kind(dtype: torch.dtype, shape: torch.Size) -> tuple[str | int, ...]:
    return (_DTYPE_NAMES[dtype], *shape)


def _layout(block: Block) -> str:
    """Name, offset and shape of every parameter: optimizer state is flat, so its meaning is this."""
    return json.dumps([[name, slot.offset, slot.shape] for name, slot in block.layout.slots.items()])


def _read_rng(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise ValueError(f"{file} is missing: the checkpoint is not complete")
    opened = open_safetensors(file)
    missing = {"torch", "numpy_keys", "numpy_rest"} - set(opened.keys())
    if missing:
        raise ValueError(f"{file} has no {min(missing)}: it is damaged")
    return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


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


def _restore_rng(saved: dict[str, Tensor], python_rng: list) -> None:
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
