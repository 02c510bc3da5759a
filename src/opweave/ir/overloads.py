"""The other ways to call an op: donating its activations, and naming providers at the call site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.ir.codegen import Kind
from opweave.ir.dispatch import Callee, Path
from opweave.ir.priority import Entries

if TYPE_CHECKING:
    from opweave.ir.op import IrOp


class IrOpInplaceOverload(Callee):
    """``op.maybe_inplace``: the op, given its activations to keep; a kernel may reuse their memory.

    Reading an activation after the call is undefined behaviour.
    """

    def __init__(self, op: IrOp, entries: Entries = ()) -> None:
        self.op = op
        self.path = Path(op, Kind.DONATING, entries, callee=self)

    def __repr__(self) -> str:
        return f"<maybe_inplace of {self.op!r}>"


class CallSite(Callee):
    """``op.using(...)``: the op with the priority of one call site in front."""

    maybe_inplace: IrOpInplaceOverload  # where the op has it

    def __init__(self, op: IrOp, entries: Entries) -> None:
        self._op = op
        self.paths = [Path(op, Kind.CALL, entries, callee=self)]
        if op.allow_inplace:
            self.maybe_inplace = IrOpInplaceOverload(op, entries)
            self.paths.append(self.maybe_inplace.path)

    def __getattr__(self, name: str) -> object:
        return getattr(self._op, name)  # everything else is the op's
