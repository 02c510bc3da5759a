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
    """The settings of a ``with`` block, merged with those of the enclosing scope."""

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
        UnknownTraitError: a trait does not exist.
    """
    required = dict.fromkeys(sorted(check_traits(traits)), "scope ir.require(...)")
    with entered(Scope(current_scope(), required=required)):
        yield


def left_to_python(what: str, enter: Callable[..., Any]) -> None:
    """Make Dynamo break the graph where a compiled function enters a scope, and say why.

    A function is compiled for the scope that it is called in, so entering one inside would be too
    late. After the break, Python runs the block.

    Args:
        what: the name in messages, such as ``ir.priority``.
        enter: the function that enters the scope.
    """
    message = (
        f"{what} cannot be traced inside a compiled function. Enter it around the call of the "
        "compiled function, or name the provider at the call: op.using('provider')(...)."
    )

    def traced(*args: Any, **kwargs: Any) -> Any:
        compat.graph_break(message)

    compat.trace_instead(enter, traced)
    compat.run_untraced(getattr(enter, "__wrapped__", enter))  # the generator of a contextmanager


compat.run_untraced(getattr(entered, "__wrapped__"))  # noqa: B009 (not to be typed)
left_to_python("op.set_priority", op_priority)
left_to_python("ir.require", require)
