"""Times the kernels of a model on their actual arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from opweave.cli.tables import PlainTable
from opweave.ir import Selection
from opweave.ir.scope import Scope, current_scope, entered
from opweave.ir.traffic import least_bytes
from opweave.tuning.timing import Effort, compare, copy_speed

_EFFORT = Effort(rounds=5, seconds=0.02)


@dataclass
class Timing:
    """The time of one kernel for one signature.

    Attributes:
        op, provider, shapes: the call and the shapes of its tensor arguments.
        calls: number of calls by the model.
        microseconds: time per call, median of 5 rounds, repeated with the same arguments.
        bytes: size of arguments and results, or None if a table is read in part.
        gb_per_second: bytes over time.
        limit_share: this bandwidth over that of a large copy on the same machine; above 1 if the
        arguments fit into a cache.
    """

    op: str
    provider: str
    shapes: str
    calls: int
    microseconds: float
    bytes: int | None
    gb_per_second: float | None
    limit_share: float | None


@dataclass
class Profile:
    """Records the arguments of each distinct call, and times the calls afterwards."""

    _calls: dict[Any, tuple[Selection, tuple[Any, ...]]] = field(default_factory=dict)
    _counts: dict[Any, int] = field(default_factory=dict)

    def add(self, selection: Selection, values: tuple[Any, ...]) -> None:
        """Count a call; the first of its kind is copied, because kernels may write to arguments."""
        key = (selection.op.name, selection.provider, _shapes(values))
        self._counts[key] = self._counts.get(key, 0) + 1
        if key not in self._calls:
            self._calls[key] = selection, _copied(values)

    def timings(self, progress: Callable[[int, int], object]) -> Iterator[Timing]:
        """Time every distinct call; *progress* gets the number of finished and of all calls."""
        limit = copy_speed()
        for done, (key, (selection, values)) in enumerate(self._calls.items()):
            progress(done, len(self._calls))
            call = partial(selection.impl.impl_fn, *values)
            with torch.inference_mode():
                results = call()
            seconds = compare({"call": call}, _EFFORT)["call"].microseconds / 1e6
            moved = least_bytes(selection.op, values, [results])
            speed = moved / seconds if moved else None
            op, provider, shapes = key
            yield Timing(
                op,
                provider,
                shapes,
                calls=self._counts[key],
                microseconds=seconds * 1e6,
                bytes=moved,
                gb_per_second=speed / 1e9 if speed else None,
                limit_share=speed / limit if speed else None,
            )


@contextmanager
def profiled() -> Iterator[Profile]:
    """Record the calls made inside the block."""
    found = Profile()
    with entered(Scope(current_scope(), recorder=found.add)):
        yield found


def timing_table(timings: list[Timing]) -> Table:
    """Return a table, sorted by total time, slowest first."""
    table = PlainTable("op", "ran", "shapes", "calls", "µs", "total µs", "GB/s", "of limit")
    for column in table.columns[3:]:
        column.justify = "right"
    for each in sorted(timings, key=lambda t: -t.microseconds * t.calls):
        table.add_row(
            each.op,
            f"[green]{each.provider}[/]",
            each.shapes.replace("[", r"\["),
            str(each.calls),
            f"{each.microseconds:.1f}",
            f"{each.microseconds * each.calls:.0f}",
            "-" if each.gb_per_second is None else f"{each.gb_per_second:.1f}",
            "-" if each.limit_share is None else f"{each.limit_share:.0%}",
        )
    return table


def as_data(timings: list[Timing]) -> list[dict[str, Any]]:
    """Return the timings as plain data."""
    return [asdict(each) for each in timings]


def _copied(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(v.detach().clone() if isinstance(v, Tensor) else v for v in values)


def _shapes(values: tuple[Any, ...]) -> str:
    shown = [f"{list(v.shape)}".replace(" ", "") for v in values if isinstance(v, Tensor)]
    return " ".join(shown)
