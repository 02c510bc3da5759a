"""Aliases of renamed objects: old names work for one version, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def alias_of(
    module: ModuleType, old: str, renamed: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` that forwards from *old* to *module*.

    Args:
        module: where the names are now.
        old: the full name of the module that was moved.
        renamed: names that have changed, old to new.
    """

    def find(name: str) -> Any:
        current = (renamed or {}).get(name, name)
        if name.startswith("_") or not hasattr(module, current):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        message = f"{old}.{name} is deprecated; use {module.__name__}.{current}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(module, current)

    return find


def renamed_in(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` for renamed objects.

    Args:
        module: the full name of the module.
        names: old names to new ones.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} is deprecated; use {module}.{names[name]}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return find
