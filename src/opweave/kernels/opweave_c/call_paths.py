"""Call paths to the native ops, and the registration of implementations that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from opweave import native
from opweave.ir import IrOp
from opweave.ir.predicate import Predicate
from opweave.ir.traits import BATCH_INVARIANT
from opweave.native import loader
from opweave.native.callables import Function

STATUS = native.status()

native_op = partial(loader.native_op, in_kernel=True)
"""Return a function that calls a native op by the fastest path."""


def implements(
    op: IrOp,
    supports_args: Predicate,
    *,
    inplace: bool = False,
    functional: Function | None = None,
    traits: Iterable[str] = (BATCH_INVARIANT,),
    provider: str = "opweave_c",
) -> Callable[[Function], Function]:
    """Register the decorated function as *provider*'s implementation of *op*."""
    return op.register_impl(
        provider,
        supported=STATUS.available,
        unsupported_reason=STATUS.reason_missing,
        supports_args=supports_args,
        inplace=inplace,
        functional=functional,
        traits=traits,
    )
