"""VERL keeps checkpoints in .../global_step_N/actor (RL) or .../global_step_N (SFT).

The trainer writes and reads what is in these folders; here they are looked up and old ones are removed. Called by
engine.py.
"""

import logging
import re
from pathlib import Path

from megatrain_rl.checkpoint import folder

logger = logging.getLogger(__name__)

_STEP = re.compile(r"global_step_(\d+)")
# VERL's SFT trainer puts its data loader's state into the checkpoint's own folder.
_LOADER_STATE = "data_*.pt"


def require(local_path: str) -> str:
    """Return `local_path`, or raise a ValueError if there is no checkpoint.

    A checkpoint that a crash has left beside its place is put back first.
    """
    folder.recover(Path(local_path))
    if not Path(local_path).is_dir():
        raise ValueError(
            f"no checkpoint at {local_path}: set trainer.resume_from_path to a global_step_N folder, "
            "or trainer.resume_mode=disable"
        )
    return local_path


def make_room(local_path: str, keep: int | None) -> list[Path]:
    """Delete the checkpoints before `local_path`, which is about to be saved, that are too many already.

    The last `keep` of them stay, and the one that VERL would resume from, so that the disk holds `keep` + 1 at most
    while the next is written. Returns the deleted folders.
    """
    return _remove_all_but(local_path, keep, saved=False)


def remove_oldest(local_path: str, keep: int | None) -> list[Path]:
    """Delete all but the last `keep` checkpoints up to `local_path`, which was just saved. Returns the deleted folders.

    Checkpoints are ordered by step number. Left alone are later steps, since the run may have been resumed from before
    them; links, and folders that are not ours; and the step that VERL would resume from, because VERL turns to the new
    one only after the save.
    """
    return _remove_all_but(local_path, keep, saved=True)


def _remove_all_but(local_path: str, keep: int | None, *, saved: bool) -> list[Path]:
    if keep is None or keep <= 0:
        return []
    this = Path(local_path).absolute()
    in_role = _STEP.fullmatch(this.name) is None
    step_dir = this.parent if in_role else this
    match = _STEP.fullmatch(step_dir.name)
    if match is None or not step_dir.parent.is_dir():
        return []
    newest, resumable = int(match.group(1)), _resumable_step(step_dir.parent)
    whole, removed = {}, []
    for path in step_dir.parent.iterdir():
        sibling = _STEP.fullmatch(path.name)
        step = int(sibling.group(1)) if sibling else newest + 1
        if step > newest or path.is_symlink() or (step == newest and not saved):
            continue
        content = path / this.name if in_role else path
        if folder.is_complete(content):
            whole[step] = content
        elif step < newest and folder.is_ours(content):
            removed.append(content)  # begun and never finished: no step can be resumed from it
        unfinished = content.with_name(content.name + ".tmp")
        if step < newest and folder.is_ours(unfinished):
            removed.append(unfinished)
    removed += [whole[step] for step in sorted(whole)[:-keep] if step != resumable]
    for path in list(removed):
        if not in_role:
            for file in path.glob(_LOADER_STATE):
                file.unlink()
        if folder.remove(path):
            logger.info("removed checkpoint %s (max_ckpt_to_keep=%d)", path, keep)
        else:  # what others put there is all that is left of it
            removed.remove(path)
    return removed


def _resumable_step(root: Path) -> int | None:
    tracker = root / "latest_checkpointed_iteration.txt"
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdigit() else None
