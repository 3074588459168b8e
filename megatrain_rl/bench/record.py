"""Record: what a benchmark prints and, with --json, leaves behind: command, place, raw lines, results.

The command line makes it, the benchmark fills it, and at the end it is put in its place. Until then, or if the
benchmark fails, all that is known is in NAME.json.partial, every figure at once, and the record that was there before
stays.
"""

import functools
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_rl.bench.environment import environment

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
    """The record of one command. raw: every line printed. results: the figures, rounded to four significant digits.

    argv: of `megatrain-rl`. command: what was run instead of that, if anything.
    """

    def __init__(self, argv: Sequence[str], command: str | None = None):
        self._command = command_line(argv) if command is None else command
        self._path: Path | None = None
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
        self.write()

    def keep_in(self, path: Path, *, append: bool = False) -> None:
        """Say where the record will be. append: to a record that is there, of the same commit and machine
        (`check_append`); a case measured again takes the place of the old one."""
        self._before = json.loads(path.read_text()) if append and path.exists() else None
        self._path = path
        self.write()

    def finish(self) -> None:
        """Put the record in its place, if anything is in it."""
        self.write()
        if self._path is not None and (self.raw or self.results):
            partial(self._path).replace(self._path)

    @functools.cached_property
    def _environment(self) -> dict[str, Any]:
        """Asked for once, and not before there is something to write: it may make a CUDA context."""
        return environment()

    def write(self) -> None:
        """Write all that is known, beside the record's place."""
        if self._path is None or not (self.raw or self.results):
            return
        content = {"command": self._command, **self._environment, "raw": self.raw}
        content["results"] = [vars(result) for result in self.results]
        if self._before is not None:
            content = _joined(self._before, content)
        unfinished = partial(self._path).with_suffix(".tmp")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(partial(self._path))


def partial(path: Path) -> Path:
    """The path at which the record `path` is kept until it is whole."""
    return path.with_name(f"{path.name}.partial")


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    cases = {result["case"] for result in new["results"]}
    kept = [result for result in old["results"] if result["case"] not in cases]
    return new | {
        "command": f"{old['command']}; {new['command']}",
        "raw": [*old["raw"], *new["raw"]],
        "results": [*kept, *new["results"]],
    }


def check_append(path: Path | None, append: bool) -> None:
    """ValueError if --append has no record, or one of another commit, machine or versions."""
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
    """Round to four significant digits, and to a whole number from 1000 on."""
    short = float(f"{value:.4g}")
    return int(short) if abs(short) >= 1000 else short


def command_line(argv: Sequence[str]) -> str:
    """The command as anybody can repeat it: files that it writes appear under the repository's folder of records."""
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
    """ValueError if a file cannot be written: told before minutes of measuring, not after them."""
    folder = None if path is None else path.absolute().parent
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{option} {path}: the folder {folder} does not exist")
    if folder is not None and not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {path}: the folder {folder} cannot be written to")
    if path is not None and path.exists() and not path.is_file():
        raise ValueError(f"{option} {path}: is not a file")
