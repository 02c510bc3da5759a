"""A loop over rows as one node of a graph: unrolled, it would make a graph for each size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opweave.ir import IrOp, compat
from opweave.ir.selection import needs_gradient

Function = Callable[..., Any]

NAMESPACE = "opweave_rows"

_library = compat.new_library(NAMESPACE)


def opaque(op: IrOp) -> Callable[[Function], Function]:
    """Make the decorated implementation of *op* a torch op, which tracers do not look into.

    Where gradients are needed they do: autograd records what the loop calls.
    """

    def wrap(loop: Function) -> Function:
        untyped: Any = _library  # torch declares no types for define and impl
        untyped.define(op.name + op.schema.torch)
        torch_op: Function = getattr(getattr(torch.ops, NAMESPACE), op.name).default

        def autograd(*args: Any, **kwargs: Any) -> Any:
            if needs_gradient(op.bind(*args, **kwargs)):
                return loop(*args, **kwargs)
            with compat.below_autograd():
                return torch_op(*args, **kwargs)

        untyped.impl(op.name, loop, "CompositeExplicitAutograd")
        untyped.impl(op.name, autograd, "Autograd")
        compat.register_fake(_library, op.name, op.fake)
        arguments = op.schema.call()
        namespace = {**op.schema.defaults, "_op": torch_op, "__name__": loop.__module__}
        function: Function = eval(f"lambda {op.schema.declaration}: _op({arguments})", namespace)
        function.__wrapped__ = loop  # type: ignore[attr-defined]
        return function

    return wrap
