"""The packages of this project, and other installed packages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

# The version of opweave, for packages that ``opweave`` itself imports.


__version__ = "0.2.0"


# Find installed packages without importing them.


PROJECT = ("opweave", "opweave_engine", "opweave_vllm")
"""The import packages of this project, which share logs and the format of warnings."""


def is_in_project(module: str) -> bool:
    """Return whether *module* belongs to one of the project's packages."""
    return module.partition(".")[0] in PROJECT


def is_installed(package: str) -> bool:
    """Return whether *package*, a name without dots, can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that was not imported from a file
        return False


def after_import(name: str, action: Callable[[ModuleType], object]) -> None:
    """Call *action* with the module *name*: now, or as soon as the process imports it."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(MetaPathFinder):
    def __init__(self, name: str, action: Callable[[ModuleType], object]) -> None:
        self._name, self._action = name, action

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the module that is waited for, with a loader that calls the action."""
        spec = PathFinder.find_spec(name, path) if name == self._name else None
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def folders_of(package: str) -> list[Path]:
    """Return the folders of *package*, a name without dots; none if it is not installed."""
    spec = importlib.util.find_spec(package) if is_installed(package) else None
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None if it is missing."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
