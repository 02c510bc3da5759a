"""Old paths of public modules: they work, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NEW = {
    "opweave_engine.communicators": "opweave_engine.parallel.communicators",
    "opweave_engine.executor": "opweave_engine.parallel.executor",
    "opweave_engine.io_processor": "opweave_engine.request.io_processor",
    "opweave_engine.model_runner": "opweave_engine.runner.model_runner",
    "opweave_engine.sampler": "opweave_engine.sampling.sampler",
    "opweave_engine.stat_logger": "opweave_engine.metrics.stat_logger",
    "opweave_engine.worker": "opweave_engine.runner.worker",
}


class MovedModules(MetaPathFinder, Loader):
    """Imports the module at the new path when the old path is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old path; None for all other modules."""
        old = ".".join(fullname.split(".")[:3])
        if old not in _NEW:
            return None
        new = _NEW[old] + fullname.removeprefix(old)
        warnings.warn(
            f"{fullname} has moved to {new}; the old path is removed in the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        return ModuleSpec(fullname, self, origin=new)

    def exec_module(self, module: ModuleType) -> None:
        """Put the module at the new path in the place of *module*."""
        spec = module.__spec__
        assert spec is not None, "the import system sets it"
        assert spec.origin is not None, "find_spec() sets it"
        sys.modules[module.__name__] = importlib.import_module(spec.origin)


def support_old_paths() -> None:
    """Let imports of old paths work, in this process."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        # First: the path of a moved package would lead other finders to a second copy of its files.
        sys.meta_path.insert(0, MovedModules())
