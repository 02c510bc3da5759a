"""Help for tests: registrations and settings that vanish at the end of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opweave.ir.op import IrOp
from opweave.ir.registry import isolated_registry

__all__ = ["isolated_registry", "restored"]


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
