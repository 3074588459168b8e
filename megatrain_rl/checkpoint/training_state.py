"""The complete training state in a directory, written beside its final name, then renamed: a crash costs no older one.

    DIR/huggingface/                 what AutoModelForCausalLM loads (bf16: the high halves of the masters)
    DIR/optimizer/BLOCK.safetensors  exp_avg, exp_avg_sq and, for bf16 weights, the residual (the masters' low halves)
    DIR/trainer_state.json           step counts, recent norms, schedule, python's generator
    DIR/rng.safetensors              torch's and numpy's generators
    DIR/.megatrain_checkpoint        a JSON list of the files above: these may be replaced and removed, others stay

Called by StreamTrainer with the optimizer at rest.
"""

import errno
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatrain_rl.checkpoint import folder, generators
from megatrain_rl.checkpoint.folder import MARKER, MODEL, OPTIMIZER, RNG, STATE
from megatrain_rl.host.store import HostStore, fill_from_checkpoint
from megatrain_rl.model.decoder import Block, DecoderSpec
from megatrain_rl.model.folder import check_finite, check_folder
from megatrain_rl.model.hf_export import Companions, write_checkpoint
from megatrain_rl.model.hf_io import CheckpointReader, open_safetensors, read_json
from megatrain_rl.optim.host_adamw import HostAdamW

FORMAT = 2
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int16: "I16"}  # safetensors' own


def save(
    directory: Path,
    spec: DecoderSpec,
    store: HostStore,
    optimizer: HostAdamW | None,
    state: dict[str, Any],
    companions: Companions,
) -> None:
    """Write everything to `DIRECTORY.tmp`, flush it to disk, and put it in the place of `directory`.

    Only a checkpoint is replaced, and files that others put into it stay. A FileExistsError before anything is written
    if something else is in the way, an OSError if the disk cannot hold the checkpoint.
    """
    directory = folder.own_folder(directory)
    scratch, old = folder.beside(directory, "tmp"), folder.beside(directory, "old")
    for path in (directory, scratch, old):
        folder.require_replaceable(path)
    folder.recover(directory)
    folder.keep_others(old, directory)  # where `save` ended before it came to that
    folder.remove(scratch)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    _require_room(directory, spec, store, optimizer)
    scratch.mkdir()
    (scratch / MARKER).touch()
    named = ((block.names[n], store.view(block, n)) for block in spec.blocks for n in block.names)
    write_checkpoint(scratch / MODEL, spec.config, named, companions)
    if optimizer is not None:
        (scratch / OPTIMIZER).mkdir()
        for block in spec.blocks:
            metadata = {"layout": _layout(block)}
            save_file(optimizer.state[block.name].tensors(), scratch / _state_file(block), metadata=metadata)
    generators.write(scratch / RNG)
    everything = {"format": FORMAT, "python_rng": generators.python_state(), **state}
    (scratch / STATE).write_text(json.dumps(everything))
    (scratch / MARKER).write_text(json.dumps(folder.files_in(scratch)))
    folder.flush(scratch)
    folder.remove(old)
    if directory.exists():
        os.replace(directory, old)
    os.replace(scratch, directory)
    folder.keep_others(old, directory)
    folder.remove(old)


def check(directory: Path, spec: DecoderSpec, store: HostStore, optimizer: HostAdamW | None) -> "Checked":
    """Check everything that `save` wrote, and change nothing; what is returned restores it.

    So every file is read twice. A ValueError names the file that is missing, damaged, of another model or of another
    dtype, or has values that cannot be meant.
    """
    directory = Path(os.path.abspath(directory))
    folder.recover(directory)
    state_file = directory / STATE
    if not state_file.is_file():
        raise ValueError(f"no checkpoint at {str(directory)!r}: {STATE} is missing")
    state = _read_state(state_file, trains=optimizer is not None)
    reader = CheckpointReader(directory / MODEL)
    check_folder(spec, reader)
    for block in spec.blocks:
        for name in block.names.values():
            check_finite(reader.tensor(name), reader.place(name))
        if optimizer is not None:
            _check_halves(reader, block, store)
            _check_optimizer(directory, block, optimizer)
    rng = generators.Generators(directory / RNG, state["python_rng"], state_file)
    return Checked(directory, spec, reader, state, rng)


@dataclass(frozen=True)
class Checked:
    """A checkpoint that was found whole."""

    directory: Path
    spec: DecoderSpec
    reader: CheckpointReader
    state: dict[str, Any]
    rng: generators.Generators

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
        self.rng.restore()
        return self.state


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


def _state_file(block: Block) -> str:
    return f"{OPTIMIZER}/{block.name}.safetensors"


def _read_state(file: Path, *, trains: bool) -> dict[str, Any]:
    state = read_json(file)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {str(file.parent)!r} has format {state.get('format')}, this version reads {FORMAT}"
        )
    counts = ["skipped_steps", *(["step_count"] if trains else [])]
    wrong = [key for key in counts if not _is_count(state.get(key))]
    if trains and not _are_norms(state.get("recent_norms")):
        wrong.append("recent_norms")
    schedule = state.get("schedule")
    if trains and not (isinstance(schedule, dict) and _is_count(schedule.get("steps_done"))):
        wrong.append("schedule")
    if not isinstance(state.get("python_rng"), list):
        wrong.append("python_rng")
    if wrong:
        raise ValueError(
            f"{file} has no {wrong[0]} to go on from: it is damaged, or the checkpoint is of a run that did not train"
        )
    return state


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_norms(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(norm, (int, float)) and math.isfinite(norm) and norm >= 0 for norm in values
    )


def _check_halves(reader: CheckpointReader, block: Block, store: HostStore) -> None:
    """The weights are the halves that the residuals complete: in another dtype they would be rounded before."""
    wanted = _DTYPE_NAMES[store.dtype]
    for name in block.names.values():
        dtype, _ = reader.header(name)
        if dtype != wanted:
            raise ValueError(
                f"{reader.place(name)} has dtype {dtype} and this run's param_dtype is {wanted}: resume with the dtype "
                "that wrote the checkpoint"
            )


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
        tensor = opened.get_tensor(name)
        check_finite(tensor, f"{file}: {name}")
        if name == "exp_avg_sq" and tensor.numel() and tensor.min() < 0:
            raise ValueError(f"{file}: {name} has negative values, which squares do not have: it is damaged")


def _kind(dtype: torch.dtype, shape: torch.Size) -> tuple[str | int, ...]:
    return (_DTYPE_NAMES[dtype], *shape)


def _layout(block: Block) -> str:
    """Name, offset and shape of every parameter: optimizer state is flat, so its meaning is this."""
    return json.dumps([[name, slot.offset, slot.shape] for name, slot in block.layout.slots.items()])
