"""Gates: exactly what was tested, pre-releases included; and the same in pyproject.toml."""

import re
from pathlib import Path

import pytest
from patch_cases import OUTSIDE

import verl_patches
from verl_patches import before_ray, hydra_overrides, log_prob_gap, tracking_monitor, versions

PYPROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text()


@pytest.mark.parametrize("version", OUTSIDE)
def test_other_versions_of_verl_are_not_tested(version):
    assert not versions.verl_is_tested({"verl": version})


@pytest.mark.parametrize("version", ["0.9.1", "0.9.1+local"])
def test_the_tested_one_is(version):
    assert versions.verl_is_tested({"verl": version})


def test_the_installed_one_is():
    assert versions.verl_is_tested()


@pytest.mark.parametrize(
    "version, within", [("0.1.10", True), ("0.1.11.dev0", False), ("0.2.0rc1", False), ("0.2", False)]
)
def test_a_range_has_no_pre_releases(version, within):
    """Newer versions of `packaging` would let them in by themselves."""
    assert versions.hold({"TransferQueue": ">=0.1.10,<0.2"}, {"TransferQueue": version}) == within


def test_without_verl_nothing_holds():
    assert versions.installed("no-such-distribution") is None
    assert not versions.hold({"no-such-distribution": ">=0"})


def test_pyproject_pins_what_was_tested():
    [pinned] = re.findall(r'"verl\[verl-core\]([^"]+)"', PYPROJECT)
    assert pinned == versions.TESTED_VERL


def test_every_patch_has_a_gate():
    for patch in (*verl_patches.PATCHES, before_ray, hydra_overrides, tracking_monitor, log_prob_gap):
        assert patch.VERSIONS and all(versions.installed(name) for name in patch.VERSIONS)
        for word in ("Symptom:", "Cause:", "Upstream:", "Remove when:"):
            assert word in patch.__doc__, (patch.__name__, word)
