"""Context managers for tests and benchmarks that undo changes to ops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opweave.ir.dispatch import Callee
from opweave.ir.registry import IrOp, current_registry, isolated_registry
from opweave.ir.schema import Function

__all__ = ["isolated_registry", "restored", "written_out"]


@contextmanager
def restored(*ops: IrOp) -> Iterator[None]:
    """Restore the implementations of *ops* at the end of the block."""
    for op in ops:
        op.registry.ensure_ready()
    before = {op: dict(op._groups) for op in ops}
    try:
        yield
    finally:
        for op, groups in before.items():
            op._groups = groups
            op._use_groups()


@contextmanager
def written_out() -> Iterator[None]:
    """Make Dynamo trace into the native functions of ops inside the block.

    Gives the graph of the same model written without opweave.
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
