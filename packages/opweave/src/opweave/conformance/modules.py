"""The modules that register what is to be verified."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from opweave.conformance.check import FAILURES
from opweave.conformance.errors import ModuleImportError


def import_named(asked: str, name: str) -> None:
    """Import the module *name*, for the option *asked*.

    Raises:
        ModuleImportError: the name is not valid, or the module is missing or raises.
    """
    if not all(name.split(".")) or "/" in name or "\\" in name:
        raise ModuleImportError(
            f"{asked} {name!r} is not the name of a module; write it as an import statement does, "
            "such as my_kernels or package.my_kernels."
        )
    try:
        importlib.import_module(name)
    except FAILURES as error:
        raise ModuleImportError(f"{asked} {name!r} failed: {_told(error)}.") from error


def names_by_file() -> dict[str, str]:
    """Return the names of the modules that are imported, by their files."""
    return {
        file: name
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (file := vars(module).get("__file__"))
    }


def _told(error: BaseException) -> str:
    """Return what was raised and where, in one line."""
    text = " ".join(str(error).split()).rstrip(".")
    kind = "" if isinstance(error, ImportError) and text else type(error).__name__
    told = ": ".join(filter(None, (kind, text)))
    place = "" if isinstance(error, SyntaxError) else _place(error)  # which says it itself
    return f"{told} at {place}" if place else told


def _place(error: BaseException) -> str:
    """Return the file and the line, or nothing if the module was not even found.

    Only frames in the module's own folder count: the user cannot fix others.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
    own = [f for f in ours if Path(f.filename).is_relative_to(Path(ours[0].filename).parent)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
