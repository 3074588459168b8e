"""`on_import(name, hook)`: run a hook right after a module was imported, without importing it.

The plug-in is loaded in every process that imports verl, most of which never need an engine; so nothing of ours may
pull modules in. A hook that raises makes the import of its module raise: VERL swallows a failing plug-in, but not a failing
`import verl.workers.engine`. Used by register.py only.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

Hook = Callable[[ModuleType], None]


class _PostImportFinder(importlib.abc.MetaPathFinder):
    """First on sys.meta_path; steps aside for every module without pending hooks."""

    def __init__(self):
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
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for hook in self.pending.get(name, ()):
                hook(module)
            self.pending.pop(name, None)  # after an error they wait for the next try

        spec.loader.exec_module = exec_module
        return spec


_finder = _PostImportFinder()


def on_import(name: str, hook: Hook) -> None:
    """Call `hook(module)` now if `name` is imported, else right after its import."""
    module = sys.modules.get(name)
    if module is not None:
        if module.__spec__._initializing:
            raise RuntimeError(f"{name} is just being imported: too late for a hook after its import")
        hook(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.pending.setdefault(name, []).append(hook)
