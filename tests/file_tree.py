"""A small tree of files that stands for / where code reads /proc and /sys."""

from pathlib import Path


def tree(root: Path, files: dict[str, str | int]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root
