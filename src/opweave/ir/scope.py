"""Scopes: priorities and required traits for a block of code, in one thread or asyncio task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from opweave.base import compat
from opweave.ir.priority import Entries, parse
from opweave.ir.traits import check_traits

if TYPE_CHECKING:
    from opweave.ir.op import IrOp
    from opweave.ir.selection import Selection

Recorder = Callable[["Selection", tuple[Any, ...]], None]


class Scope:
    """What holds inside a ``with`` block, what the enclosing scope says included."""

    def __init__(
        self,
        parent: Scope | None,
        priorities: Mapping[IrOp, Entries] | None = None,
        required: Mapping[str, str] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        inherited = parent.priorities if parent else {}
        own = priorities or {}
        self.priorities: dict[IrOp, list[Entries]] = {
            op: [own[op], *inherited.get(op, [])] if op in own else inherited[op]
            for op in {**own, **inherited}
        }
        self.required: dict[str, str] = {**(parent.required if parent else {}), **(required or {})}
        self.recorders: tuple[Recorder, ...] = (parent.recorders if parent else ()) + (
            (recorder,) if recorder else ()
        )
        # (call path, its version) -> the function generated for it under this scope
        self.compiled: dict[tuple[object, int], Callable[..., Any]] = {}


_current: ContextVar[Scope | None] = ContextVar("opweave_ir_scope", default=None)
current_scope = _current.get


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Make *scope* the current one inside the block."""
    token = _current.set(scope)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def op_priority(op: IrOp, providers: Sequence[str]) -> Iterator[None]:
    """Prefer *providers* for one op inside the block; see :meth:`IrOp.set_priority`."""
    entries = parse(providers, f"scope {op.name}.set_priority(...)")
    op.check_providers(entries)
    with entered(Scope(current_scope(), priorities={op: entries})):
        yield


@contextmanager
def require(*traits: str) -> Iterator[None]:
    """Admit only implementations with all of *traits* inside the block.

    ``with ir.require("batch_invariant"): ...``

    Raises:
        UnknownTraitError: a name is no trait.
    """
    required = dict.fromkeys(sorted(check_traits(traits)), "scope ir.require(...)")
    with entered(Scope(current_scope(), required=required)):
        yield


def left_to_python(what: str, enter: Callable[..., Any]) -> None:
    """Let Dynamo break the graph, with a message of ours, where a compiled function enters a scope.

    The selection belongs to the call of the compiled function: it is compiled for the scope that it
    is called in. After the break, Python runs the block.

    Args:
        what: how programs write it.
        enter: the function.
    """
    message = (
        f"{what} inside a compiled function cannot be part of its graph. Enter it around the call "
        "of the compiled function, or name the provider at the call: op.using('provider')(...)."
    )

    def traced(*args: Any, **kwargs: Any) -> Any:
        compat.graph_break(message)

    compat.trace_instead(enter, traced)
    compat.run_untraced(getattr(enter, "__wrapped__", enter))  # of contextmanager


compat.run_untraced(getattr(entered, "__wrapped__"))  # noqa: B009 (not to be typed)
left_to_python("op.set_priority", op_priority)
left_to_python("ir.require", require)
