"""Measures the cells of a family, and makes rows of what it finds."""

from __future__ import annotations

import math
import resource
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from harness import Watch, interleaved, microseconds, significant, within
from kernel_cells.cases import PROVIDER
from kernel_cells.cell import Cell
from kernel_cells.contenders import Contender, Inductor, ours, rejection, ring_of, torch_baseline
from kernel_cells.stream import COLD_BYTES, Stream

_WARM_BATCH_US, _COLD_BATCH_US = 100.0, 2000.0
_MOST_CALLS = 1000
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 1.5
_FEWEST = 3  # rounds, however long they take
_LONGER = 4
_NEAR = 0.07  # of the bar
_MUCH = 0.1  # of what was measured
Row = dict[str, Any]


@dataclass(slots=True)
class Results:
    """Rows, and cells without one: why."""

    rows: list[Row] = field(default_factory=list)
    skipped: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Timed:
    """The times of each contender and stream by round, and the disturbed share."""

    times: dict[str, list[float]]
    disturbed: float


@dataclass(frozen=True, slots=True)
class Clock:
    """How cells are timed, with one number of threads."""

    rounds: int
    watch: Watch
    stream: Stream

    def time(
        self, measures: dict[str, Callable[[], float]], *, longer: int = 1, fewest: int = _FEWEST
    ) -> Timed:
        """Time *measures* in *longer* times as many rounds, *fewest* of them at the least."""
        self.watch.renew(longer)
        rounds = within(
            longer * self.rounds,
            fewest=fewest,
            least=longer * _LEAST_SECONDS,
            most=longer * _MOST_SECONDS,
            clock=self.watch.clock,
        )
        watched = {
            name: partial(self.watch.undisturbed, measure) for name, measure in measures.items()
        }
        taken, kept = self.watch.taken, self.watch.kept
        times = interleaved(watched, rounds)
        share = (self.watch.kept - kept) / (self.watch.taken - taken)
        return Timed(times, significant(share, 2))


def measure_family(cells: list[Cell], clock: Clock, results: Results) -> None:
    """Measure *cells*, which share one function that Inductor compiles."""
    inductor: Inductor | None = None
    for cell in cells:
        inputs = cell.inputs()
        reason = rejection(cell, inputs)
        if reason is not None:
            skipped = {"name": f"kernel.{cell.name}", "case": str(cell), "reason": reason}
            results.skipped.append(skipped)
            continue
        if inductor is None:
            inductor = Inductor(cell, inputs)
        elif inductor.reason is None:
            inductor.warm_up(inputs)
        results.rows += _measure(cell, inputs, clock, inductor)


def _measure(cell: Cell, inputs: tuple[Any, ...], clock: Clock, inductor: Inductor) -> list[Row]:
    outputs = _outputs(cell, inputs)
    read, written = cell.case.traffic(inputs, outputs)
    size = math.ceil(COLD_BYTES / max(read, written)) if cell.is_cold else 1
    ring = ring_of(inputs, size)
    contenders = {state: ours(cell, state, ring) for state in cell.states}
    contenders["eager"] = Contender(torch_baseline(cell), ring)
    if inductor.reason is None:
        contenders["inductor"] = Contender(inductor.call, ring)
    measures = _measures(contenders, _COLD_BATCH_US if cell.is_cold else _WARM_BATCH_US)
    if cell.is_bound_by_memory:
        measures |= {"copy": clock.stream.copy, "read": clock.stream.read}
        if cell.updates:
            measures["update"] = clock.stream.update
    moved = read * cell.case.passes, written
    rows = _rows(cell, clock.time(measures), moved, inductor.reason)
    if any(map(is_worth_longer, rows)):
        timed = clock.time(measures, longer=_LONGER, fewest=clock.rounds)
        rows = _rows(cell, timed, moved, inductor.reason)
    for row in rows:
        if row["outputs"] == "fresh":
            row["page_faults"] = _page_faults(contenders["fresh"])
    return rows


def _rows(cell: Cell, timed: Timed, moved: tuple[int, int], reason: str | None) -> list[Row]:
    """Return a row for each state; *moved* is how many bytes are read and written."""
    medians = {name: statistics.median(found) for name, found in timed.times.items()}
    rows = [_row(cell, state, medians, reason) for state in cell.states]
    for row in rows:
        row["spread"] = _spread(timed.times[row["outputs"]])
        row["disturbed"] = timed.disturbed
        if cell.is_bound_by_memory:
            in_place = row["outputs"] == "reused" and cell.updates
            stream = sum(moved) / medians[cell.case.stream] / 1e3
            least = least_microseconds(*moved, medians, in_place=in_place)
            row["stream_share"] = significant(stream / row["value"], 3)
            row["limit_share"] = significant(least / row["value"], 3)
    if cell.is_bound_by_memory:
        rows[-1]["least_share"] = cell.case.least_share
    return rows


def is_worth_longer(row: Row) -> bool:
    """Whether noise may have decided on which side of a bar *row* is, or others disturbed it."""
    over = [row["ratio"]]
    if row.get("least_share"):
        over.append(row["stream_share"] / row["least_share"])
    return is_much_disturbed(row) or any(abs(times - 1) < _NEAR for times in over)


def is_much_disturbed(row: Row) -> bool:
    """Whether others disturbed a good part of what *row* was measured by."""
    return bool(row["disturbed"] > _MUCH)


def _outputs(cell: Cell, inputs: tuple[Any, ...]) -> list[Tensor]:
    found = cell.op.using(f"{PROVIDER}!")(*inputs)
    return [found] if isinstance(found, Tensor) else list(found)


def _measures(
    contenders: dict[str, Contender], batch_microseconds: float
) -> dict[str, Callable[[], float]]:
    """Return, for each contender, what takes its time per call, long enough to be timed."""
    turn = 0

    def take(contender: Contender, size: int) -> float:
        nonlocal turn
        batch = contender.batch(turn, size)
        turn += size
        return microseconds(contender.call, batch)

    measures: dict[str, Callable[[], float]] = {}
    for name, contender in contenders.items():
        take(contender, 1)
        size, better = 0, 1
        while size < better:  # the first calls take longer than those that follow
            size = better
            better = min(_MOST_CALLS, math.ceil(batch_microseconds / take(contender, size)))
        measures[name] = partial(take, contender, size)
    return measures


def _row(cell: Cell, state: str, medians: dict[str, float], reason: str | None) -> Row:
    """Return the row of *state*; its baseline is the faster of eager and Inductor."""
    shape, rounded = cell.shape, {name: significant(value) for name, value in medians.items()}
    against = min(("eager", "inductor"), key=lambda name: medians.get(name, math.inf))
    row: Row = {
        "name": f"kernel.{cell.name}",
        "case": f"{cell}, {state} output",
        "value": rounded[state],
        "unit": "us",
        "baseline": rounded[against],
        "ratio": significant(rounded[against] / rounded[state]),
        "against": against,
        "eager": rounded["eager"],
        "variant": cell.case.variant,
        "dtype": cell.dtype,
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "context": shape.context,
        "threads": cell.threads,
        "outputs": state,
    }
    return row | ({"inductor": rounded["inductor"]} if reason is None else {"no_inductor": reason})


def least_microseconds(
    read: int, written: int, speeds: dict[str, float], *, in_place: bool
) -> float:
    """Return how long the memory takes for so many bytes at the least.

    As much of what is read as is written is a copy, or an update in place; the rest is a read.
    """
    pairs = min(read, written)
    rest = max(read, written) - pairs
    moved = 2 * pairs / speeds["update" if in_place else "copy"]
    return (moved + rest / speeds["read" if read > written else "copy"]) / 1e3


def _spread(times: list[float]) -> float:
    """Return the distance between the quartiles over the median."""
    low, middle, high = statistics.quantiles(times, n=4)
    return significant((high - low) / middle, 2)


def _page_faults(contender: Contender) -> int:
    """Return the page faults of one call."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    contender.call(*contender.ring[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
