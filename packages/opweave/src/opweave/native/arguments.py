"""The name and the arguments of an op, from its schema."""

from __future__ import annotations

from opweave.base import compat


def name_of(op: compat.OpOverload) -> str:
    """Return the op's name without its namespace."""
    return op._schema.name.partition("::")[2]


def arguments_of(op: compat.OpOverload) -> tuple[tuple[str, bool], ...]:
    """Return the name of each argument, and whether the op mutates it."""
    return tuple((argument.name, argument.is_write) for argument in op._schema.arguments)


# Makes Dynamo call the functions instead of tracing them, since it cannot trace schema objects.
# torch.compiler.assume_constant_result sets the same, but importing it imports all of Dynamo.
name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
arguments_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
