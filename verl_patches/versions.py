"""The versions that were tested, and the gate of every patch."""

from collections.abc import Mapping
from importlib import metadata

from packaging.specifiers import SpecifierSet

# The same as in pyproject.toml. Exactly what the tests run with: fields of VERL's configs have moved between two patch releases.
TESTED_VERL = "==0.9.1"


def installed(name: str) -> str | None:
    """The version of a distribution, or None without one."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def hold(versions: Mapping[str, str], found: Mapping[str, str] | None = None) -> bool:
    """Whether every distribution is installed in a version within its range. A pre-release is only within a range that names it.

    found: versions that take the place of the installed ones.
    """
    found = found or {}
    for name, wanted in versions.items():
        version = found.get(name) or installed(name)
        if version is None or not SpecifierSet(wanted).contains(version):
            return False
    return True


def verl_is_tested(found: Mapping[str, str] | None = None) -> bool:
    return hold({"verl": TESTED_VERL}, found)
