"""The call variants ``op.maybe_inplace`` and ``op.using(...)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opweave.ir.codegen import Kind
from opweave.ir.dispatch import Callee, Path
from opweave.ir.priority import Entries
from opweave.ir.selection import policy_for

if TYPE_CHECKING:
    from opweave.ir.impl import IrOpImpl
    from opweave.ir.op import IrOp


class IrOpInplaceOverload(Callee):
    """``op.maybe_inplace``: call the op and donate its activations.

    A kernel may write its outputs into their memory, so reading an activation after the call is
    undefined behavior.

    Attributes:
        op: the op.
        path: its call path.
    """

    def __init__(self, op: IrOp, entries: Entries = ()) -> None:
        self.op = op
        self.path = Path(op, Kind.DONATING, entries, callee=self)

    def __repr__(self) -> str:
        return f"<maybe_inplace of {self.op!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        names = [str(entry) for entry in self.path.call_site]
        return getattr, (self.op.using(*names) if names else self.op, "maybe_inplace")


class CallSite(Callee):
    """``op.using(...)``: call the op with a priority that comes before all others.

    Attributes:
        op: the op.
        entries: the priority.
        paths: its call paths, functional and donating.
        maybe_inplace: the donating variant, if the op has one.
    """

    maybe_inplace: IrOpInplaceOverload

    def __init__(self, op: IrOp, entries: Entries) -> None:
        self.op, self.entries = op, entries
        self.paths = [Path(op, Kind.CALL, entries, callee=self)]
        if op.allow_inplace:
            self.maybe_inplace = IrOpInplaceOverload(op, entries)
            self.paths.append(self.maybe_inplace.path)

    def __repr__(self) -> str:
        return f"<{self.op.name}.using({', '.join(repr(str(e)) for e in self.entries)})>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _call_site, (self.op, *map(str, self.entries))

    def __getattr__(self, name: str) -> Any:
        if name == "maybe_inplace":
            return getattr(self.op, name)  # raises DonationError
        raise AttributeError(f"{self!r} has no attribute {name!r}; see the op, its attribute 'op'.")

    def dispatch(self, *args: Any, **kwargs: Any) -> IrOpImpl:
        """Return the implementation that a call with these arguments would run."""
        return self.op.dispatch_at(self.entries, *args, **kwargs)

    def get_priority(self) -> list[str]:
        """Return the providers in the current order of priority, this call site's first."""
        return [str(entry) for entry in policy_for(self.op, self.entries).priority]


def _call_site(op: IrOp, *providers: str) -> CallSite:
    return op.using(*providers)


class TracedCallSite:
    """``op.using(...)`` while Dynamo traces: calls the torch op with the names as an argument.

    Dynamo cannot trace code generation, so this class avoids it. The names are checked when the
    graph runs.
    """

    def __init__(self, op: IrOp, using: str) -> None:
        self._op, self._using = op, using

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._op.torch_ops.annotated(*args, using=self._using, **kwargs)

    def maybe_inplace(self, *args: Any, **kwargs: Any) -> Any:
        donate = self._op.activation_indices
        return self._op.torch_ops.annotated(*args, using=self._using, donate=donate, **kwargs)
