"""`on_import(name, hook)` runs a hook right after a module was imported, and does not import the module itself.

The plug-in is loaded in every process that imports verl, and most of these never need an engine, so nothing of ours may
import what it changes. A hook that raises makes the import of its module raise: VERL swallows a failing plug-in, but
not a failing `import verl.workers.engine`. Used by megatrain_rl/verl_plugin/register.py only.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

from verl_patches.wrap import wrap

Hook = Callable[[ModuleType], None]


class _PostImportFinder(importlib.abc.MetaPathFinder):
    """The first finder on sys.meta_path. It finds nothing itself but modules with pending hooks."""

    def __init__(self) -> None:
        self.pending: dict[str, list[Hook]] = {}
        self._resolving: set[str] = set()

    def find_spec(self, name, path, target=None) -> importlib.machinery.ModuleSpec | None:
        if name not in self.pending or name in self._resolving:
            return None
        self._resolving.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._resolving.discard(name)
        if spec is None or spec.loader is None:
            return spec

        def exec_module(execute: Hook, module: ModuleType) -> None:
            execute(module)
            for hook in self.pending.get(name, ()):
                hook(module)
            self.pending.pop(name, None)  # after an error they wait for the next try

        wrap(spec.loader, "exec_module", exec_module, patch=__name__)
        return spec


_finder = _PostImportFinder()


def on_import(name: str, hook: Hook) -> None:
    """Call `hook(module)` now if `name` is imported already, else right after its import."""
    module = sys.modules.get(name)
    if module is not None:
        spec = module.__spec__
        assert spec is not None, f"{name} was not imported"
        if spec._initializing:  # type: ignore[attr-defined]  # importlib's private flag; README.md lists it
            raise RuntimeError(f"{name} is just being imported: too late for a hook after its import")
        hook(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.pending.setdefault(name, []).append(hook)
