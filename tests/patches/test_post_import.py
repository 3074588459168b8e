"""Hooks run right after an import, and an import without its hooks does not succeed."""

import importlib
import sys

import pytest

from verl_patches.post_import import on_import


@pytest.fixture
def module_on_disk(tmp_path, monkeypatch):
    (tmp_path / "mt_hooked_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "mt_hooked_module"
    sys.modules.pop("mt_hooked_module", None)


def test_hooks_run_after_import_and_at_once_if_imported(module_on_disk):
    seen = []
    on_import(module_on_disk, lambda m: seen.append(("first", m.VALUE)))
    on_import(module_on_disk, lambda m: seen.append(("second", m.VALUE)))
    assert seen == []
    importlib.import_module(module_on_disk)
    assert seen == [("first", 1), ("second", 1)]
    on_import(module_on_disk, lambda m: seen.append(("late", m.VALUE)))
    assert seen[-1] == ("late", 1)


def test_failing_hook_fails_the_import(module_on_disk):
    def fail(_):
        raise RuntimeError("engine could not be registered")

    seen = []
    on_import(module_on_disk, lambda m: seen.append(m))
    on_import(module_on_disk, fail)
    for times in (1, 2):  # an import that swallowed the error must not lead to a module without its hooks
        with pytest.raises(RuntimeError, match="could not be registered"):
            importlib.import_module(module_on_disk)
        assert len(seen) == times and module_on_disk not in sys.modules
