"""Warnings about entries of ``custom_ops`` and replacements that had no effect on a model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from itertools import count

from opweave.base.packages import is_in_project
from opweave.config import CompilationConfig
from opweave.ir.errors import did_you_mean
from opweave.layers.errors import UnusedOpWarning
from opweave.layers.registry import full_name, op_registry, op_registry_oot
from opweave.layers.replaceable import Replaceable


def warn_of_unused_ops(config: CompilationConfig) -> None:
    """Warn about each op in ``custom_ops`` that was not built under *config*.

    Call it after a model is built. The warning points to the innermost line outside opweave.
    """
    built = config.enabled_custom_ops.keys() | config.disabled_custom_ops.keys()
    for name in sorted(config.named_custom_ops - built):
        if name in op_registry:
            reason = "is not present in the model, so it has no effect"
        else:
            reason = "doesn't exist (or wasn't imported or registered). " + _meant(name)
        warnings.warn(
            f"custom_ops names {name!r}, which {reason.rstrip('.')}.",
            UnusedOpWarning,
            stacklevel=_outside(),
        )


def warn_of_unused_replacements() -> None:
    """Warn about each replacement of an unknown layer, after a model's layers are imported."""
    replacements = set(op_registry_oot.values())
    names = {*op_registry, *(c.__name__ for c in _subclasses(Replaceable) if c not in replacements)}
    for name in sorted(op_registry_oot.keys() - names):
        warnings.warn(
            f"{full_name(op_registry_oot[name])} replaces {name!r}, which no layer is called. "
            + did_you_mean(name, names),
            UnusedOpWarning,
            stacklevel=_outside(),
        )


def _subclasses(cls: type[object]) -> Iterator[type[object]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _meant(name: str) -> str:
    by_class = {layer.__name__: registered for registered, layer in op_registry.items()}
    return did_you_mean(by_class.get(name, name), op_registry)


def _outside() -> int:
    """Return the ``stacklevel`` of the innermost frame outside opweave."""
    for level in count(1):
        name = sys._getframe(level).f_globals.get("__name__", "")
        if not is_in_project(name):
            return level
    raise AssertionError("unreachable: a stack begins somewhere")
