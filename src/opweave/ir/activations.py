"""The activations of an op: the tensors that ``maybe_inplace`` donates, one for each output."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from opweave.ir.errors import InvalidOpError, did_you_mean
from opweave.ir.schema import Schema


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


def check_inplace(
    schema: Schema,
    op_name: str,
    activations: Sequence[str],
    *,
    allow_inplace: bool,
    keeps_strides: Collection[str],
) -> None:
    """Raise InvalidOpError if outputs cannot take the place of activations as declared."""
    if allow_inplace and len(activations) != schema.num_outputs:
        raise InvalidOpError(
            f"op {op_name!r}: allow_inplace=True needs as many activations as outputs; found "
            f"activations {list(activations)} and {schema.num_outputs} output(s)."
        )
    for name in sorted(set(keeps_strides).difference(activations)):
        raise InvalidOpError(
            f"op {op_name!r}: keeps_strides names {name!r}, which is not an activation. "
            f"{did_you_mean(name, activations)}"
        )
