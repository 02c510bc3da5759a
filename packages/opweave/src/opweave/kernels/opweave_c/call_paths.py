"""Call paths to the native ops, and the registration of implementations that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from opweave import native
from opweave.ir import IrOp
from opweave.ir.predicate import Predicate
from opweave.ir.traits import BATCH_INVARIANT
from opweave.ir.tunable import Tunable
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
    tunable: Tunable | None = None,
    provider: str = "opweave_c",
    needs: Sequence[str] = (),
) -> Callable[[Function], Function]:
    """Register the decorated function as *provider*'s implementation of *op*.

    Args:
        needs: native ops that a module built from older sources may lack.
    """
    lacking = [name for name in needs if not loader.has_native_op(name)]
    reason = STATUS.reason_missing
    if reason is None and lacking:
        reason = f"the native module was built from older sources, without {', '.join(lacking)}"
    return op.register_impl(
        provider,
        supported=reason is None,
        unsupported_reason=reason,
        supports_args=supports_args,
        inplace=inplace,
        functional=functional,
        traits=traits,
        tunable=tunable,
    )
