"""Call paths to the native ops, and the registration of implementations that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from opweave import native
from opweave.base import compat
from opweave.ir import IrOp
from opweave.ir.predicate import Predicate
from opweave.ir.traits import BATCH_INVARIANT

Function = Callable[..., Any]

STATUS = native.status()

_CALLS = """
def {name}({arguments}):
    try:
        return direct({arguments})
    except TypeError:  # not plain CPU tensors
        return dispatched({arguments})

def traced({arguments}):
    return torch.ops.opweave_c.{name}.default({arguments})
"""


def native_op(name: str) -> Function:
    """Return a function that calls the native op *name* by the fastest path.

    It first tries the module's own function, which is cheap but only accepts plain CPU tensors, and
    falls back to torch's dispatcher. The function is generated with explicit parameters, because
    passing ``*arguments`` would cost more than the call itself. Dynamo traces the torch op instead.
    """
    if not STATUS.available:
        return _unavailable
    op = getattr(torch.ops.opweave_c, name).default
    arguments = ", ".join(argument.name for argument in op._schema.arguments)
    namespace = {
        "__name__": __name__,
        "torch": torch,
        "direct": getattr(native.module(), name) if STATUS.fast_call else op,
        "dispatched": op,
    }
    exec(_CALLS.format(name=name, arguments=arguments), namespace)
    function: Function = namespace[name]
    compat.trace_instead(function, namespace["traced"])
    return function


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


def _unavailable(*arguments: object) -> None:
    raise RuntimeError(f"the native ops are not available: {STATUS.reason_missing}.")
