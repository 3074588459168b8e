"""The command line of the scripts that make a record of a finished run: grpo_record.py and learning_record.py."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from megatrain_rl.bench.record import Record, check_append, check_writable


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    made.add_argument("case")
    made.add_argument("--command", required=True, help="what was run")
    made.add_argument("--json", type=Path, required=True)
    made.add_argument("--append", action="store_true", help="to a record of the same commit and machine")
    made.add_argument("--check", action="store_true", help="only whether the record could be written, before the run")
    return made


def write(arguments: argparse.Namespace, fill: Callable[[Record], None]) -> None:
    """Let `fill` put in what the run left, and write the record; what is missing is one line.

    With --check nothing is read or written.
    """
    record = Record([], command=arguments.command)
    try:
        check_writable(arguments.json, "--json")
        check_append(arguments.json, arguments.append)
        if arguments.check:
            return
        fill(record)
    except (OSError, ValueError) as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")
    record.keep_in(arguments.json, append=arguments.append)
    record.finish()
