"""Record which implementations run: ``ir.record`` and ``opweave.explain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opweave.ir.explain import Explanation, explained
from opweave.ir.scope import Scope, current_scope, entered, left_to_python
from opweave.ir.selection import Selection


@dataclass
class Record:
    """The implementations that ran: the number of calls for each distinct outcome of each op."""

    _counts: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _examples: dict[tuple[Any, ...], Explanation] = field(default_factory=dict)

    def add(self, selection: Selection, values: tuple[Any, ...]) -> None:
        """Count one call."""
        key = (selection.op.name, selection.provider, selection.rejected)
        if key not in self._examples:
            self._examples[key] = explained(selection, values)
        self._counts[key] = self._counts.get(key, 0) + 1

    def outcomes(self) -> list[tuple[Explanation, int]]:
        """Return an example call for each distinct outcome, and the number of such calls."""
        # A copy, because another thread may add calls.
        return [(self._examples[key], count) for key, count in list(self._counts.items())]

    @property
    def selected_impls(self) -> dict[str, dict[str, int]]:
        """Calls by op and provider: ``{"rms_norm": {"opweave_c": 26}}``."""
        result: dict[str, dict[str, int]] = {}
        for (op, provider, _), count in self._counts.items():
            by_provider = result.setdefault(op, {})
            by_provider[provider] = by_provider.get(provider, 0) + count
        return result

    def __str__(self) -> str:
        """Return a table with a row for each distinct outcome."""
        rows = [_COLUMNS]
        for explained_call, count in self.outcomes():
            chosen = next(v for v in explained_call.verdicts if v.outcome == "chosen")
            verdicts = explained_call.verdicts
            others = [f"{v.provider}: {v.reason}" for v in verdicts if v is not chosen]
            first, *more = others or ["-"]
            rows.append((explained_call.op, chosen.provider, str(count), chosen.origin, first))
            rows += [("", "", "", "", other) for other in more]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


_COLUMNS = ("op", "ran", "calls", "because of", "the others")


@contextmanager
def record() -> Iterator[Record]:
    """Record which implementations run inside the block, in this thread or asyncio task.

    Recorded calls are slower, because they bypass the fast path.
    """
    log = Record()
    with entered(Scope(current_scope(), recorder=log.add)):
        yield log


def explain_model(model: Callable[..., Any], /, *inputs: Any, **options: Any) -> Record:
    """Run ``model(*inputs, **options)`` once, and record which implementations its ops run.

    This is ``opweave.explain``. ``print`` the result for a table with each distinct outcome of an
    op, the number of such calls, the setting that led to it, and why other providers did not run.
    :func:`opweave.ir.explain` explains one call of an op without running it.

    Args:
        model: a module or function in eager mode; for compiled code, use
            ``opweave.compile.report()``.
    """
    with record() as log:
        model(*inputs, **options)
    return log


left_to_python("ir.record", record)
