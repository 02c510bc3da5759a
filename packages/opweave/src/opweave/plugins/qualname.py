"""Resolves qualified names to objects."""

from __future__ import annotations

import importlib
from typing import Any

from opweave.ir.errors import did_you_mean
from opweave.plugins.errors import ReferenceNameError


def resolve_obj_by_qualname(name: str) -> Any:
    """Return the object named ``"package.module.Class"`` or ``"package.module:Class"``.

    Raises:
        ReferenceNameError: (an ImportError) the name is malformed, or there is no such module or
            no such object in it. Errors of the import are not caught.
    """
    module_name, attributes = split_qualname(name)
    found: Any = _import(module_name, name)
    for attribute in attributes:
        try:
            found = getattr(found, attribute)
        except AttributeError:
            known = [each for each in vars(found) if not each.startswith("_")]
            raise ReferenceNameError(
                f"{name!r} names nothing: {module_name} has no {attribute!r}. "
                f"{did_you_mean(attribute, known)}"
            ) from None
    return found


def split_qualname(name: str) -> tuple[str, list[str]]:
    """Split a qualified name into module and attributes, without importing.

    Raises:
        ReferenceNameError: (an ImportError) the name is malformed.
    """
    text = name if isinstance(name, str) else ""
    module, _, attributes = text.partition(":") if ":" in text else text.rpartition(".")
    parts = [*module.split("."), *attributes.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise ReferenceNameError(
            f"{name!r} is not a qualified name; expected 'package.module.Class' or "
            "'package.module:Class'."
        )
    return module, attributes.split(".")


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a dependency of the module is missing
        raise ReferenceNameError(
            f"{name!r} names nothing: there is no module {error.name!r}. Install the package that "
            "has it, or mend the name."
        ) from None
