"""Record the op calls of a model run into a trace."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from opweave.ir.scope import Scope, current_scope, entered
from opweave.ir.selection import Selection, tokens_of
from opweave.tuning.arguments import describe, signature
from opweave.tuning.errors import TraceError
from opweave.tuning.trace import Trace, TracedCall


class Recorder:
    """Collects distinct calls.

    Args:
        data: also store the tensors of the first call of each kind.
    """

    def __init__(self, *, data: bool = False) -> None:
        self._data = data
        self._calls: dict[Hashable, TracedCall] = {}
        self._counts: dict[Hashable, int] = {}
        self._trace = Trace.here()

    @property
    def trace(self) -> Trace:
        """The calls recorded so far."""
        calls = [replace(call, count=self._counts[key]) for key, call in self._calls.items()]
        return replace(self._trace, calls=calls)

    def add(self, selection: Selection, values: tuple[Any, ...]) -> None:
        """Count one call."""
        op = selection.op
        if op.name in self._trace.skipped:
            return
        key = (op.name, selection.provider, signature(values))
        self._counts[key] = self._counts.get(key, 0) + 1
        if key not in self._calls:
            try:
                self._calls[key] = self._described(selection, values, len(self._calls))
            except TraceError as error:
                self._trace.skipped[op.name] = str(error)

    def _described(self, selection: Selection, values: tuple[Any, ...], number: int) -> TracedCall:
        arguments = {
            name: describe(value, self._keeper(f"{number}.{name}") if self._data else None)
            for name, value in zip(selection.op.schema.names, values, strict=True)
        }
        tokens = int(tokens_of(selection.op, values) or 0) if selection.op.schema.tensors else 0
        return TracedCall(selection.op.name, selection.provider, 0, tokens, arguments)

    def _keeper(self, prefix: str) -> Callable[[Tensor], str]:
        def keep(tensor: Tensor) -> str:
            key = prefix
            while key in self._trace.data:  # of a list
                key += "_"
            self._trace.data[key] = tensor.detach().cpu().clone()
            return key

        return keep


@contextmanager
def record_calls(*, data: bool = False) -> Iterator[Recorder]:
    """Record the op calls inside the block, in this thread or asyncio task.

    Calls inside a compiled graph are not seen: run the model in eager mode.

    Args:
        data: also store the tensors of the first call of each kind.
    """
    recorder = Recorder(data=data)
    with entered(Scope(current_scope(), recorder=recorder.add)):
        yield recorder
