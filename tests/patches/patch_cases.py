"""Every patch is tested for this: it is applied in tested versions only, and it raises if a name is missing there."""

import types
from collections.abc import Callable

import verl_patches

OUTSIDE = ("0.9.0", "0.9.1rc1", "0.9.2", "0.10.0.dev0", "1.0")


def asked(verl: str, **found: str) -> dict[str, Callable]:
    """The modules that patches wait for, with this VERL installed, and what happens when they are imported."""
    modules: dict[str, Callable] = {}
    verl_patches.install(
        modules.__setitem__,
        prepare=unexpected, prepare_sft=unexpected, check_overrides=unexpected, attach_monitor=unexpected, compare_log_probs=unexpected,
        found={"verl": verl} | found,
    )  # fmt: skip
    return modules


def unexpected(*arguments) -> None:
    raise AssertionError("called")


def empty(name: str) -> types.ModuleType:
    """A module of that name in which every name is missing."""
    return types.ModuleType(name)
