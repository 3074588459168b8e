"""VERL keeps checkpoints in .../global_step_N/actor (RL) or .../global_step_N (SFT).

The trainer writes and reads what is in these folders; here they are looked up and old ones are removed. Called by
engine.py.
"""

import logging
import re
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

_STEP = re.compile(r"global_step_(\d+)")


def require(local_path: str) -> str:
    """Return `local_path`, or raise a ValueError if there is no checkpoint."""
    if not Path(local_path).is_dir():
        raise ValueError(
            f"no checkpoint at {local_path}: set trainer.resume_from_path to a global_step_N folder, "
            "or trainer.resume_mode=disable"
        )
    return local_path


def remove_oldest(local_path: str, keep: int | None) -> list[Path]:
    """Delete all but the last `keep` checkpoints up to `local_path`, which was just saved. Returns the deleted folders.

    Checkpoints are ordered by step number. Three kinds of folders are left alone: later steps, since the run may have
    been resumed from before them; links, and folders of other names; and the step that VERL would resume from, because
    VERL turns to the new one only after the save.
    """
    if keep is None or keep <= 0:
        return []
    saved = Path(local_path).absolute()
    in_role = _STEP.fullmatch(saved.name) is None
    step_dir = saved.parent if in_role else saved
    match = _STEP.fullmatch(step_dir.name)
    if match is None:
        return []
    newest, resumable = int(match.group(1)), _resumable_step(step_dir.parent)
    steps = {}
    for path in step_dir.parent.iterdir():
        sibling = _STEP.fullmatch(path.name)
        content = path / saved.name if in_role else path
        is_link = path.is_symlink() or content.is_symlink()
        if sibling and int(sibling.group(1)) <= newest and content.is_dir() and not is_link:
            steps[int(sibling.group(1))] = content
    removed = [steps[step] for step in sorted(steps)[:-keep] if step != resumable]
    for path in removed:
        shutil.rmtree(path)
        logger.info("removed checkpoint %s (max_ckpt_to_keep=%d)", path, keep)
    return removed


def _resumable_step(root: Path) -> int | None:
    tracker = root / "latest_checkpointed_iteration.txt"
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdigit() else None
