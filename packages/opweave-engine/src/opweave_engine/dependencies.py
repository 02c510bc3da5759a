"""Optional dependencies, imported where they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from opweave_engine.errors import MissingDependencyError


def require(name: str, extra: str = "") -> Any:
    """Import and return module *name*, a dependency of opweave-engine, or of its extra *extra*.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"opweave's engine needs {name.partition('.')[0]!r}, which cannot be imported "
            f"({error}). Install it with: pip install "
            + (f"'opweave-engine[{extra}]'" if extra else "opweave-engine")
        ) from error
