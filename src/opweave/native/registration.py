"""What torch takes as an op: asked before torch registers any, because it forgets none."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from types import ModuleType

import torch

from opweave.base import compat


def schemas(raw: ModuleType) -> dict[str, str]:
    """Return the schemas of the ops of *raw*, by name."""
    names = (name for name in dir(raw) if not name.startswith("_"))
    return {name: getattr(raw, name).__doc__ for name in names}


def refusal(found: Mapping[str, str], namespace: str) -> str | None:
    """Return why a module with these schemas is of no use: it has none, or torch refuses one."""
    if not found:
        return "no source of it registers an op, in OPWEAVE_EXTENSION_MODULE(m) { m.def(...); }"
    attributes = compat.namespace_attributes(namespace)  # such as name
    for op, schema in found.items():
        if op in attributes:
            return (
                f"torch.ops.{namespace}.{op} is no op in any namespace, so '{schema}' needs "
                "another name"
            )
        try:
            parsed = compat.parse_schema(f"{namespace}::{schema}")
        except RuntimeError as error:
            why = str(error).partition("\n")[0].removesuffix(" here:")
            return f"torch does not take the schema of op {op!r}, '{schema}': {why}"
        for name in (op, *(argument.name for argument in parsed.arguments)):
            if keyword.iskeyword(name) or name.startswith("_"):
                return (
                    f"'{schema}' cannot be compiled: {name!r} is a word of Python's or begins "
                    "with an underscore, as names of torch's own do; choose another name"
                )
    return None


def defined_before(found: Mapping[str, str], namespace: str) -> str | None:
    """Return which op something else has defined already."""
    for op, schema in found.items():
        if hasattr(getattr(torch.ops, namespace), op):
            return (
                f"torch.ops.{namespace}.{op} exists already, so torch cannot define '{schema}'; "
                "choose another name"
            )
    return None


def failure(problem: str | None) -> str | None:
    """Return *problem*, of a module's ``_open``, if the module's ops are at fault and not torch.

    A torch that lacks what a module needs leaves it without torch ops, which is no mistake of it.
    """
    return problem if problem is not None and problem.startswith("torch could not ") else None
