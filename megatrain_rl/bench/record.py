"""Record: what a benchmark prints and, with --json, leaves behind: command, place, raw lines, results.

Made by the command line, filled by the benchmark, written at its end. Until then every figure is in NAME.json.partial at once: a run that
is cut leaves what it knew, and the record that was there before.
"""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_rl.profiling import environment

# Where records live in the repository; a record's command names its file there, wherever it was written.
RECORDS = "recipes/records"
_PATH_OPTIONS = ("--json", "--trace", "--trace-picture")


@dataclass(frozen=True, kw_only=True)
class Result:
    case: str
    metric: str
    value: float
    unit: str


class Record:
    """raw: every line printed. results: the figures, rounded to four significant digits.

    argv: of `megatrain-rl`; or command: what was run instead.
    """

    def __init__(self, argv: Sequence[str], command: str | None = None):
        self._command = command_line(argv) if command is None else command
        self._path: Path | None = None
        self._partial: Path | None = None
        self._before: dict[str, Any] | None = None
        self.raw: list[str] = []
        self.results: list[Result] = []

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.raw.append(line)

    def result(self, case: str, metric: str, value: float, unit: str) -> None:
        result = Result(case=case, metric=metric, value=rounded(value), unit=unit)
        self.results.append(result)
        print(f"{case} {metric} {result.value} {unit}".rstrip(), flush=True)
        self._write()

    def keep_in(self, path: Path, *, append: bool = False) -> None:
        """Where the record will be; OSError if it cannot be written there. append: to a record that is there, of the same commit and
        machine (`check_append`); a case measured again takes the place of the old one."""
        self._path, self._partial = path, path.with_name(f"{path.name}.partial")
        self._partial.touch()
        self._before = json.loads(path.read_text()) if append and path.exists() else None
        self._write()

    def finish(self) -> None:
        """Put the record in its place, if anything is in it."""
        if self._path is None:
            return
        self._write()
        if self.raw or self.results:
            self._partial.replace(self._path)
        else:
            self._partial.unlink()

    def _write(self) -> None:
        if self._path is None or not (self.raw or self.results):
            return
        content = {"command": self._command, **environment(), "raw": self.raw}
        content["results"] = [vars(result) for result in self.results]
        if self._before is not None:
            content = _joined(self._before, content)
        unfinished = self._partial.with_name(f"{self._partial.name}.tmp")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(self._partial)


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    cases = {result["case"] for result in new["results"]}
    kept = [result for result in old["results"] if result["case"] not in cases]
    return new | {
        "command": f"{old['command']}; {new['command']}",
        "raw": [*old["raw"], *new["raw"]],
        "results": [*kept, *new["results"]],
    }


def check_append(path: Path | None, append: bool) -> None:
    """A record is of one commit on one machine."""
    if not append:
        return
    if path is None:
        raise ValueError("--append needs --json, the record to append to")
    if path.exists():
        old, now = json.loads(path.read_text()), environment()
        for key in ("commit", "hardware", "versions"):
            if old[key] != now[key]:
                raise ValueError(f"--append {path}: that record is of another {key}; write a new one")


def rounded(value: float) -> float:
    """Four significant digits; whole numbers from 1000 on."""
    short = float(f"{value:.4g}")
    return int(short) if abs(short) >= 1000 else short


def command_line(argv: Sequence[str]) -> str:
    """The command as anybody can repeat it: files that are written appear under the repository's folder of records."""
    words: list[str] = []
    for word in argv:
        option, equals, value = word.partition("=")
        if words and words[-1] in _PATH_OPTIONS:
            word = f"{RECORDS}/{Path(word).name}"
        elif equals and option in _PATH_OPTIONS:
            word = f"{option}={RECORDS}/{Path(value).name}"
        words.append(word)
    return shlex.join(["megatrain-rl", *words])


def check_writable(path: Path | None, option: str) -> None:
    """Before minutes of measuring, not after them."""
    folder = None if path is None else path.absolute().parent
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{option} {path}: the folder {folder} does not exist")
    if folder is not None and not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {path}: the folder {folder} cannot be written to")
