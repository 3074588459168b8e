"""Options that the benchmarks' command lines share, and how cases and settings are read."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain_rl.bench.shapes import SHAPES
from megatrain_rl.config import StreamConfig


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of results: its name, and the tokens of one step."""

    name: str
    tokens: int


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument(
        "--append", action="store_true", help="to the record that is there, if commit and machine are the same"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small ceilings, to see that the command runs; its figures mean nothing"
    )


def add_model(parser: argparse.ArgumentParser, *, shape: str) -> None:
    parser.add_argument("--shape", default=shape, help=", ".join(SHAPES))
    parser.add_argument("--layers", type=int, help="so many layers instead of the shape's own number")


def add_cases(parser: argparse.ArgumentParser, *, steps: int, warmup: int) -> None:
    parser.add_argument(
        "--case", action="append", metavar="NAME=TOKENS", help="tokens of a step; repeat it for several in one process"
    )
    parser.add_argument("--mean-length", type=int, default=1024, help="lengths are 0.5 to 1.5 times this")
    parser.add_argument("--steps", type=int, default=steps, help="steps measured, at least 3")
    parser.add_argument("--warmup", type=int, default=warmup, help="steps before them")
    parser.add_argument("--seed", type=int, default=0)


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", help="a setting of StreamConfig")


def read_cases(arguments: argparse.Namespace, *, default: Sequence[str]) -> list[Case]:
    """The cases in the order given. Checks --steps, --warmup and --mean-length too. ValueError names the option."""
    if arguments.steps < 3:
        raise ValueError(f"--steps {arguments.steps}: must be at least 3, the figure is a median")
    if arguments.warmup < 0:
        raise ValueError(f"--warmup {arguments.warmup}: must not be negative")
    if arguments.mean_length < 2:
        raise ValueError(f"--mean-length {arguments.mean_length}: must be at least 2")
    cases = [parse_case(text) for text in arguments.case or default]
    if len({c.name for c in cases}) < len(cases):
        raise ValueError("--case: two cases have the same name")
    return cases


def check_settle(arguments: argparse.Namespace) -> None:
    if arguments.settle < 0:
        raise ValueError(f"--settle {arguments.settle}: must not be negative")


def parse_case(text: str) -> Case:
    name, _, tokens = text.partition("=")
    if not name or not tokens.isdecimal() or int(tokens) < 1:
        raise ValueError(f"--case {text}: must be NAME=TOKENS, like 7b-16k=16384")
    return Case(name=name, tokens=int(tokens))


def read_settings(items: Sequence[str]) -> dict[str, Any]:
    """Read KNOB=VALUE pairs. A value is JSON where it can be (9, true, null), else text. ValueError without "="."""
    knobs: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--set {item}: must be KNOB=VALUE")
        try:
            knobs[name] = json.loads(value)
        except json.JSONDecodeError:
            knobs[name] = value
    return knobs


def read_config(items: Sequence[str]) -> StreamConfig:
    return StreamConfig.from_mapping(read_settings(items), prefix="--set ")


def run_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
