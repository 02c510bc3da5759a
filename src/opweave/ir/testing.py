"""Help for tests and benchmarks: what vanishes at the end of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opweave.ir.codegen import Function
from opweave.ir.dispatch import Callee
from opweave.ir.op import IrOp
from opweave.ir.registry import current_registry, isolated_registry

__all__ = ["isolated_registry", "restored", "written_out"]


@contextmanager
def restored(*ops: IrOp) -> Iterator[None]:
    """Undo, at the end of the block, every implementation registered for *ops* inside it."""
    before = {op: dict(op.impls) for op in ops}
    try:
        yield
    finally:
        for op, impls in before.items():
            op._impls = impls
            op.reset()


@contextmanager
def written_out() -> Iterator[None]:
    """Let Dynamo trace, inside the block, the native functions where a program calls ops.

    What is compiled there is what someone without opweave would have written.
    """
    ops = list(current_registry().ops.values())
    natives: dict[Callee, Function] = {op: op.native for op in ops}
    natives |= {op.maybe_inplace: op.native for op in ops if op.allow_inplace}
    before = {callee: callee.traced for callee in natives}
    try:
        for callee, native in natives.items():
            callee.traced = native
        yield
    finally:
        for callee, traced in before.items():
            callee.traced = traced
