"""The activations of an op: the tensors that ``maybe_inplace`` donates, one for each output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opweave.ir.errors import InvalidOpError, did_you_mean
from opweave.ir.schema import Schema

if TYPE_CHECKING:
    from opweave.ir.op import IrOp


def activations_of(schema: Schema, op_name: str, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the activations in the order of the parameters.

    Raises:
        InvalidOpError: one of *names* is not a required tensor parameter.
    """
    tensors = [p.name for p in schema.tensors if not p.is_optional]
    if names is None:
        return tuple(name for name in tensors if name.startswith("x"))
    for name in names:
        if name not in tensors:
            raise InvalidOpError(
                f"op {op_name!r}: activation {name!r} is not a required tensor parameter. "
                f"{did_you_mean(name, tensors)}"
            )
    return tuple(name for name in tensors if name in names)


def check_inplace(op: IrOp) -> None:
    """Raise InvalidOpError if outputs cannot take the place of activations as declared."""
    if op.allow_inplace and len(op.activations) != op.schema.num_outputs:
        raise InvalidOpError(
            f"op {op.name!r}: allow_inplace=True needs as many activations as outputs; found "
            f"activations {list(op.activations)} and {op.schema.num_outputs} output(s)."
        )
    for name in sorted(op.keeps_strides.difference(op.activations)):
        raise InvalidOpError(
            f"op {op.name!r}: keeps_strides names {name!r}, which is not an activation. "
            f"{did_you_mean(name, op.activations)}"
        )
