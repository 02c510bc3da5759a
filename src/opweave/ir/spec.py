"""What is known of an op when it is declared, and never changes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from opweave.base.owner import Owner, current_owner
from opweave.base.site import Site, caller_site
from opweave.ir.activations import activations_of, check_inplace
from opweave.ir.errors import InvalidOpError
from opweave.ir.names import check_op_name
from opweave.ir.schema import Schema
from opweave.ir.traits import DIFFERENTIABLE, check_traits


@dataclass(frozen=True, eq=False)
class OpSpec:
    """The declaration of an op. Knows no registry, no implementations and no settings.

    Attributes:
        name: of the op, in ``ir.ops`` and in ``torch.ops``.
        native: the function that defines it.
        schema: its parameters and outputs.
        activations: the parameters that ``maybe_inplace`` gives up.
        allow_inplace: whether it has ``maybe_inplace``.
        composite: whether native is written in other ops, so that compilers can recognise it.
        keeps_strides: the activations whose copies must have their strides.
        native_traits: what native promises, see :mod:`opweave.ir.traits`.
        site: where it was declared.
        owner: the plugin that declared it, if one did.
    """

    name: str
    native: Callable[..., Any]
    schema: Schema
    activations: tuple[str, ...]
    allow_inplace: bool
    composite: bool
    keeps_strides: frozenset[str]
    native_traits: frozenset[str]
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
    ) -> OpSpec:
        """Read the declaration of an op.

        Raises:
            InvalidNameError: the name is ill-formed or taken.
            InvalidOpError: *native* cannot be an op, or the options do not fit it.
            UnknownTraitError: a trait does not exist.
        """
        if not inspect.isfunction(native):
            raise InvalidOpError(
                f"an op is declared with a plain Python function (def), not with {native!r}."
            )
        name = check_op_name(native.__name__ if name is None else name)
        schema = Schema.of(native, name)
        found = activations_of(schema, name, activations)
        check_inplace(schema, name, found, allow_inplace=allow_inplace, keeps_strides=keeps_strides)
        return cls(
            name,
            native,
            schema,
            found,
            allow_inplace,
            composite,
            frozenset(keeps_strides),
            check_traits({DIFFERENTIABLE, *native_traits}),
            caller_site(),
            current_owner(),
        )
