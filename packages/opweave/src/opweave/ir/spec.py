"""The immutable declaration of an op."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from opweave.base.owner import Owner, current_owner
from opweave.base.site import Site, caller_site
from opweave.ir.errors import InvalidOpError, did_you_mean
from opweave.ir.names import check_op_name
from opweave.ir.schema import Schema
from opweave.ir.traits import DIFFERENTIABLE, check_traits


@dataclass(frozen=True, eq=False)
class OpSpec:
    """The declaration of an op, without its registry, implementations and settings.

    Attributes:
        name: the name in ``ir.ops`` and ``torch.ops``.
        native: the function that defines it.
        schema: its parameters and outputs.
        activations: the parameters that ``maybe_inplace`` donates, in the order of the schema.
        allow_inplace: whether it has ``maybe_inplace``.
        composite: whether native is written in other ops, so that the compiler can recognize it.
        keeps_strides: the activations whose outputs have the strides of the input.
        native_traits: the promises of native, see :mod:`opweave.ir.traits`.
        autocast: whether ``torch.autocast`` applies to calls; if not, they run with it disabled.
        site: where it was declared.
        owner: the plugin that declared it, if any.
    """

    name: str
    native: Callable[..., Any]
    schema: Schema
    activations: tuple[str, ...]
    allow_inplace: bool
    composite: bool
    keeps_strides: frozenset[str]
    native_traits: frozenset[str]
    autocast: bool
    site: Site
    owner: Owner | None

    @classmethod
    def of(
        cls,
        native: Callable[..., Any],
        *,
        name: str | None = None,
        activations: Sequence[str] | None = None,
        allow_inplace: bool = False,
        composite: bool = False,
        native_traits: Iterable[str] = (),
        keeps_strides: Sequence[str] = (),
        autocast: bool = True,
    ) -> OpSpec:
        """Check and return the declaration of an op; see :func:`opweave.ir.register_op`.

        Raises:
            InvalidNameError: the name is malformed or reserved.
            InvalidOpError: *native* cannot be an op, or the options do not fit it.
            UnknownTraitError: a trait does not exist.
        """
        if not inspect.isfunction(native):
            raise InvalidOpError(
                f"an op must be declared with a Python function (def), not with {native!r}."
            )
        name = check_op_name(native.__name__ if name is None else name)
        schema = Schema.of(native, name)
        found = _activations(schema, name, activations)
        if allow_inplace and len(found) != schema.num_outputs:
            raise InvalidOpError(
                f"op {name!r}: allow_inplace=True needs as many activations as outputs; found "
                f"activations {list(found)} and {schema.num_outputs} output(s)."
            )
        for kept in sorted(set(keeps_strides).difference(found)):
            raise InvalidOpError(
                f"op {name!r}: keeps_strides names {kept!r}, which is not an activation. "
                f"{did_you_mean(kept, found)}"
            )
        return cls(
            name,
            native,
            schema,
            found,
            allow_inplace,
            composite,
            frozenset(keeps_strides),
            check_traits({DIFFERENTIABLE, *native_traits}),
            autocast,
            caller_site(),
            current_owner(),
        )


def _activations(schema: Schema, op_name: str, names: Sequence[str] | None) -> tuple[str, ...]:
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
