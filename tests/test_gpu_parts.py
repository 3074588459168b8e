"""Every GPU test is in exactly one part: the parts together are the whole GPU suite."""

import json
import subprocess
import sys

import pytest
from gpu_parts import GPU_PARTS, TESTS

# Collects all tests in a process of its own and prints the parts of each GPU test.
COLLECT = """
import json, sys
import pytest

class Parts:
    def pytest_collection_modifyitems(self, items):
        self.found = {
            item.nodeid: [mark.name for mark in item.iter_markers() if mark.name.startswith("gpu_part")]
            for item in items if item.get_closest_marker("gpu")
        }

parts = Parts()
pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", sys.argv[1]], plugins=[parts])
print("\\n" + json.dumps(parts.found))
"""


@pytest.fixture(scope="module")
def parts_of_tests() -> dict[str, list[str]]:
    command = [sys.executable, "-c", COLLECT, str(TESTS)]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_gpu_test_is_in_one_part(parts_of_tests):
    assert len(parts_of_tests) > 100
    wrong = {test: parts for test, parts in parts_of_tests.items() if len(parts) != 1}
    assert not wrong, "give their files one place in GPU_PARTS of tests/gpu_parts.py"


def test_every_part_has_tests_and_every_place_exists(parts_of_tests):
    assert {part for parts in parts_of_tests.values() for part in parts} == set(GPU_PARTS)
    assert [place for places in GPU_PARTS.values() for place in places if not (TESTS / place).exists()] == []


def test_the_marks_are_declared(pytestconfig):
    declared = {line.split(":")[0] for line in pytestconfig.getini("markers")}
    assert set(GPU_PARTS) == {mark for mark in declared if mark.startswith("gpu_part")}
