"""Where VERL keeps checkpoints: .../global_step_N/actor in RL, .../global_step_N in SFT; the trainer fills them.

Called by engine.py.
"""

import re
import shutil
from pathlib import Path

_STEP = re.compile(r"global_step_(\d+)$")


def require(local_path: str) -> str:
    """`local_path`, or a ValueError if there is no checkpoint."""
    if not Path(local_path).is_dir():
        raise ValueError(
            f"no checkpoint at {local_path}: set trainer.resume_from_path to a global_step_N folder, "
            "or trainer.resume_mode=disable"
        )
    return local_path


def remove_oldest(local_path: str, keep: int | None) -> list[Path]:
    """Delete all but the last `keep` checkpoints up to `local_path`, which was just saved; returns the deleted.

    Ordered by step number. Later steps, of a run that was resumed from before them, are left alone.
    """
    if keep is None or keep <= 0:
        return []
    saved = Path(local_path).resolve()
    in_role = _STEP.search(saved.name) is None
    step_dir = saved.parent if in_role else saved
    match = _STEP.search(step_dir.name)
    if match is None:
        return []
    newest = int(match.group(1))
    steps = {}
    for path in step_dir.parent.iterdir():
        sibling = _STEP.search(path.name)
        content = path / saved.name if in_role else path
        if sibling and int(sibling.group(1)) <= newest and content.is_dir():
            steps[int(sibling.group(1))] = content
    removed = [steps[step] for step in sorted(steps)[:-keep]]
    for path in removed:
        shutil.rmtree(path)
    return removed
