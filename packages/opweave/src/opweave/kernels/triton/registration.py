"""Register implementations in Triton."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from opweave.adapters.opaque import opaque
from opweave.base.packages import is_installed
from opweave.ir import IrOp
from opweave.ir.predicate import Predicate
from opweave.ir.traits import BATCH_INVARIANT

Function = Callable[..., Any]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels on CPU tensors."""

NAMESPACE = "opweave_triton"
_IS_THERE = is_installed("triton")


def block_of(size: int) -> int:
    """Return the smallest power of two that is at least *size*.

    >>> [block_of(size) for size in (1, 64, 65)]
    [1, 64, 128]
    """
    return 1 << max(size - 1, 0).bit_length()


def implements(
    op: IrOp,
    supports_args: Predicate,
    *,
    inplace: bool = False,
    traits: Iterable[str] = (BATCH_INVARIANT,),
) -> Callable[[Function], Function]:
    """Register the decorated function as the Triton implementation of *op*.

    The function becomes an opaque op, unless it is in-place. An in-place implementation must call
    its kernels through :func:`opweave.adapters.opaque.mutating`.
    """
    register = op.register_impl(
        "triton",
        supported=_IS_THERE,
        unsupported_reason=None if _IS_THERE else "Triton is not installed",
        supports_args=supports_args,
        inplace=inplace,
        traits=traits,
    )
    make_opaque = opaque(op, NAMESPACE)
    return register if inplace else lambda function: register(make_opaque(function))
