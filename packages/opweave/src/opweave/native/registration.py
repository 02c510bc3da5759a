"""Checks of op schemas before torch registers them, because registration is permanent."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from types import ModuleType

import torch

from opweave.base import compat


def schemas(raw: ModuleType) -> dict[str, str]:
    """Return the schemas of the ops of *raw* by name."""
    names = (name for name in dir(raw) if not name.startswith("_"))
    return {name: getattr(raw, name).__doc__ for name in names}


def refusal(found: Mapping[str, str], namespace: str) -> str | None:
    """Return why a module with these schemas is unusable, or None if it is usable."""
    if not found:
        return "its sources register no op with OPWEAVE_EXTENSION_MODULE(m) { m.def(...); }"
    attributes = compat.namespace_attributes(namespace)  # such as 'name'
    for op, schema in found.items():
        if op in attributes:
            return (
                f"torch reserves {op!r} in every namespace of torch.ops, so '{schema}' needs "
                "another name"
            )
        try:
            parsed = compat.parse_schema(f"{namespace}::{schema}")
        except RuntimeError as error:
            why = str(error).partition("\n")[0].removesuffix(" here:")
            return f"torch rejects the schema of op {op!r}, '{schema}': {why}"
        for name in (op, *(argument.name for argument in parsed.arguments)):
            if keyword.iskeyword(name) or name.startswith("_"):
                return (
                    f"'{schema}' cannot be compiled: {name!r} is a Python keyword or starts with "
                    "an underscore; choose another name"
                )
    return None


def defined_before(found: Mapping[str, str], namespace: str) -> str | None:
    """Return a message if another module has defined one of these ops."""
    for op, schema in found.items():
        if hasattr(getattr(torch.ops, namespace), op):
            return (
                f"torch.ops.{namespace}.{op} already exists, so torch cannot define '{schema}'; "
                "choose another name"
            )
    return None


def failure(problem: str | None) -> str | None:
    """Return *problem*, reported by a module's ``_open``, if its ops are at fault and not torch.

    A version of torch that lacks a needed symbol is not an error of the module: it works without
    torch ops.
    """
    return problem if problem is not None and problem.startswith("torch could not ") else None
