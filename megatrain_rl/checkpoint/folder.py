"""The folder of a checkpoint: which are ours, what may be replaced and removed, and what belongs to others.

Only what training_state.py has written is ever deleted. Called by that module and by the plug-in's retention.
"""

import contextlib
import errno
import json
import os
from pathlib import Path

# This file marks a folder as ours and lists what was written. While it is empty the folder is being written.
MARKER = ".megatrain_checkpoint"
STATE, RNG, MODEL, OPTIMIZER = "trainer_state.json", "rng.safetensors", "huggingface", "optimizer"


def own_folder(directory: Path) -> Path:
    """The absolute path of the folder to write. Not the one that this process stands in: it is replaced as a whole."""
    absolute = Path(os.path.abspath(directory))
    if absolute in (Path.cwd(), *Path.cwd().parents):
        raise FileExistsError(
            errno.EEXIST, "a checkpoint is a folder of its own, not one that this process works in: name a folder in it",
            str(directory),
        )  # fmt: skip
    return absolute


def require_replaceable(path: Path) -> None:
    there = path.exists() or path.is_symlink()
    empty = there and path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if there and not empty and not is_ours(path):
        raise FileExistsError(
            errno.EEXIST,
            "this is no checkpoint of megatrain_rl, so it is not replaced and nothing was written: move it away, or save "
            "elsewhere (trainer.default_local_dir)",
            str(path),
        )


def beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(f"{directory.name}.{suffix}")


def recover(directory: Path) -> None:
    """Put a checkpoint back into its place if `save` ended between its two renames."""
    old = beside(directory, "old")
    if not directory.exists() and is_complete(old):
        os.replace(old, directory)


def is_complete(path: Path) -> bool:
    """Whether `path` is a folder with a whole checkpoint of ours. A link is not."""
    return not path.is_symlink() and (path / STATE).is_file()


def is_ours(path: Path) -> bool:
    """Whether `path` is a folder that `save` has written or begun to write. A link is not."""
    if path.is_symlink() or not path.is_dir():
        return False
    if (path / MARKER).is_file():
        return True
    try:  # a checkpoint of a version that made no marker
        return "format" in json.loads((path / STATE).read_text())
    except (OSError, ValueError, TypeError):
        return False


def remove(path: Path) -> bool:
    """Delete a folder that is ours, or empty; whether there was anything to delete.

    Files that others put into it stay, and with them the marker: what `save` puts there later keeps them. The state
    goes first and the marker last: a folder that is removed in part is no checkpoint to resume from, and is still ours.
    """
    if not is_ours(path):
        if path.is_symlink() or not path.is_dir():
            return False
        path.rmdir()  # an OSError unless it is empty
        return True
    own = own_files(path)
    for name in sorted(own - {MARKER}, key=lambda name: name != STATE):
        (path / name).unlink()
    if set(files_in(path)) <= {MARKER}:
        (path / MARKER).unlink(missing_ok=True)
    for folder, _, _ in os.walk(path, topdown=False):
        with contextlib.suppress(OSError):  # there are files of others in it
            os.rmdir(folder)
    return own != {MARKER} or not path.exists()


def files_in(directory: Path) -> list[str]:
    """The files below `directory`, and links, by their paths from there."""
    return [
        str((Path(folder) / name).relative_to(directory))
        for folder, folders, files in os.walk(directory)
        for name in (*files, *(each for each in folders if (Path(folder) / each).is_symlink()))
    ]


def own_files(directory: Path) -> set[str]:
    """The files of a folder that is ours which `save` has written."""
    found = set(files_in(directory))
    marker = directory / MARKER
    text = marker.read_text() if marker.is_file() else ""
    try:
        return (set(json.loads(text)) | {MARKER}) & found
    except (ValueError, TypeError):
        if directory.suffix == ".tmp":  # being written: nobody else has anything there
            return found
        # of a version that kept no list: all that stands where its files stand
        return {name for name in found if name.split("/")[0] in (MARKER, STATE, RNG, MODEL, OPTIMIZER)}


def keep_others(old: Path, directory: Path) -> None:
    """Move what others have put into a replaced checkpoint to the new one. A name that is taken gets `.old`."""
    if not (is_ours(old) and is_ours(directory)):
        return
    for name in set(files_in(old)) - own_files(old):
        place = directory / name
        while place.exists() or place.is_symlink():
            place = beside(place, "old")
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(old / name, place)


def flush(directory: Path) -> None:
    """Files and folders to disk before the rename, so that a power cut cannot leave a renamed but empty checkpoint."""
    for folder, _, files in os.walk(directory):
        for path in [Path(folder), *(Path(folder) / f for f in files)]:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
