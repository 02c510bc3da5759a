"""The choice of implementations by number of tokens, from the measurements of a machine.

It is made when a tuning file is applied (:mod:`opweave.tuning.tuning_file`).

Per op, at most two thresholds divide the numbers of tokens into ranges. A range has a provider only
if that provider is not slower than the default in any measured cell of the range, and faster in at
least one; otherwise it has the default. A provider that was wrong or crashed in any cell of the op
is never chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from opweave.ir.priority import PriorityEntry, SizeRange
from opweave.tuning.measure import Cell, bucket

_MAX_RANGES = 3
_Cells = Sequence[Cell]


@dataclass(frozen=True)
class _Range:
    """Consecutive buckets, and the provider to choose for them; None: the default."""

    buckets: tuple[int, ...]
    provider: str | None
    saved: float  # microseconds of all calls


def ranges_of(cells: Iterable[Cell], origin: str) -> dict[str, list[SizeRange]]:
    """Return the priorities by number of tokens for each op where a choice saves time.

    Args:
        cells: the cells of one machine.
        origin: the name of the file, for explanations.
    """
    priorities = {}
    for op, of_op in itertools.groupby(sorted(cells, key=lambda c: c.op), lambda c: c.op):
        by_bucket: dict[int, list[Cell]] = {}
        for cell in sorted(_trusted(list(of_op)), key=lambda cell: cell.tokens):
            by_bucket.setdefault(bucket(cell.tokens), []).append(cell)
        best = _best(by_bucket)
        if any(token_range.provider for token_range in best):
            priorities[op] = list(_as_priorities(best, by_bucket, origin))
    return priorities


def _trusted(cells: _Cells) -> list[Cell]:
    """Return the cells without providers that were wrong or crashed in one of them."""
    bad = {m.provider for c in cells for m in c.results if m.status in ("failed", "crashed")}
    return [
        replace(cell, results=tuple(m for m in cell.results if m.provider not in bad))
        for cell in cells
    ]


def _best(cells: dict[int, list[Cell]]) -> list[_Range]:
    """Return the division that saves most time; of equal ones, that with the fewest ranges."""
    buckets = tuple(cells)
    choices: list[list[_Range]] = []
    for count in range(1, min(_MAX_RANGES, len(buckets)) + 1):
        for cuts in itertools.combinations(range(1, len(buckets)), count - 1):
            bounds = itertools.pairwise((0, *cuts, len(buckets)))
            choices.append([_chosen(buckets[low:high], cells) for low, high in bounds])
    return max(choices, key=lambda ranges: sum(r.saved for r in ranges))


def _chosen(buckets: tuple[int, ...], cells: dict[int, list[Cell]]) -> _Range:
    inside = [cell for tokens in buckets for cell in cells[tokens]]
    best = _Range(buckets, None, 0.0)
    for provider in dict.fromkeys(m.provider for cell in inside for m in cell.results):
        saved = _saved(provider, inside)
        if saved > best.saved:
            best = _Range(buckets, provider, saved)
    return best


def _saved(provider: str, cells: _Cells) -> float:
    """Return the microseconds that a provider saves; 0 if it may be slower, wrong or no faster."""
    total, wins = 0.0, False
    for cell in cells:
        status = next((m.status for m in cell.results if m.provider == provider), "rejected")
        usual, tuned = cell.time(cell.default), cell.time(provider)
        if status == "rejected":
            continue  # the call runs the default
        if cell.busy or tuned is None or usual is None or tuned.microseconds > usual.microseconds:
            return 0.0
        wins = wins or cell.is_faster(provider)
        total += cell.calls * (usual.microseconds - tuned.microseconds)
    return total if wins else 0.0


def _as_priorities(
    ranges: Sequence[_Range], cells: dict[int, list[Cell]], origin: str
) -> Iterator[SizeRange]:
    for this, following in itertools.zip_longest(ranges, ranges[1:]):
        limit = None
        if following is not None:
            # Numbers of tokens between two measured buckets have the default, if one side has.
            limit = this.buckets[-1] if this.provider else following.buckets[0] // 2
        inside = [cell for tokens in this.buckets for cell in cells[tokens]]
        yield SizeRange(limit, _entries(this.provider, inside, origin))


def _entries(provider: str | None, cells: _Cells, origin: str) -> tuple[PriorityEntry, ...]:
    if provider is None:
        return ()
    tuned, usual = 0.0, 0.0
    for cell in cells:
        measured, default = cell.time(provider), cell.time(cell.default)
        if measured is not None and default is not None:
            tuned += cell.calls * measured.microseconds
            usual += cell.calls * default.microseconds
    calls = sum(cell.calls for cell in cells if cell.time(provider) is not None)
    text = f"tuned: {tuned / calls:.3g} µs against {usual / calls:.3g} µs, {origin}"
    return (PriorityEntry(provider, False, text),)
