"""A loop over rows as one node of a graph: unrolled, it would make a graph for each size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opweave.ir import IrOp
from opweave.ir.opaque import opaque_op

Function = Callable[..., Any]

NAMESPACE = "opweave_rows"


def opaque(op: IrOp) -> Callable[[Function], Function]:
    """Make the decorated implementation of *op* a torch op, which tracers do not look into.

    Where gradients are needed they do: autograd records what the loop calls.
    """

    def wrap(loop: Function) -> Function:
        torch_op = opaque_op(NAMESPACE, op.name, loop, op.fake, op.schema.torch)
        arguments = op.schema.call()
        namespace = {**op.schema.defaults, "_op": torch_op, "__name__": loop.__module__}
        function: Function = eval(f"lambda {op.schema.declaration}: _op({arguments})", namespace)
        function.__wrapped__ = loop  # type: ignore[attr-defined]
        return function

    return wrap
