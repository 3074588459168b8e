"""The tested versions, and the check by which a patch is applied in these only: its gate."""

from collections.abc import Mapping
from importlib import metadata

from packaging.specifiers import SpecifierSet

# The same as in pyproject.toml: exactly the version that the tests run with. Fields of VERL's configs have moved
# between two patch releases.
TESTED_VERL = "==0.9.1"


def installed(name: str) -> str | None:
    """The version of a distribution, or None without one."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def hold(versions: Mapping[str, str], found: Mapping[str, str] | None = None) -> bool:
    """Whether every distribution is installed in a version within its range.

    A pre-release is within a range only if the range names it.

    found: versions that take the place of the installed ones.
    """
    found = found or {}
    for name, wanted in versions.items():
        version = found.get(name) or installed(name)
        spec = SpecifierSet(wanted)
        # said in so many words: without it, newer versions of `packaging` let pre-releases in
        if version is None or not spec.contains(version, prereleases=bool(spec.prereleases)):
            return False
    return True


def verl_is_tested(found: Mapping[str, str] | None = None) -> bool:
    return hold({"verl": TESTED_VERL}, found)
