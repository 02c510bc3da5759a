"""Choose implementations by number of tokens, from the cells of a tuning file.

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
from opweave.tuning.cell import Cell, bucket
from opweave.tuning.timing import is_faster

_MOST_RANGES = 3
Cells = Sequence[Cell]


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
    found = {}
    for op, own in itertools.groupby(sorted(cells, key=lambda c: c.op), lambda c: c.op):
        by_bucket: dict[int, list[Cell]] = {}
        for cell in sorted(_trusted(own), key=lambda cell: cell.tokens):
            by_bucket.setdefault(bucket(cell.tokens), []).append(cell)
        best = _best(by_bucket)
        if any(each.provider for each in best):
            found[op] = list(_as_priorities(best, by_bucket, origin))
    return found


def _trusted(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells without providers that were wrong or crashed in one of them."""
    found = list(cells)
    bad = {m.provider for c in found for m in c.results if m.status in ("failed", "crashed")}
    return [
        replace(cell, results=tuple(m for m in cell.results if m.provider not in bad))
        for cell in found
    ]


def _best(cells: dict[int, list[Cell]]) -> list[_Range]:
    """Return the division that saves most time; of equal ones, that with the fewest ranges."""
    buckets = tuple(cells)
    choices: list[list[_Range]] = []
    for count in range(1, min(_MOST_RANGES, len(buckets)) + 1):
        for cuts in itertools.combinations(range(1, len(buckets)), count - 1):
            bounds = itertools.pairwise((0, *cuts, len(buckets)))
            choices.append([_chosen(buckets[low:high], cells) for low, high in bounds])
    return max(choices, key=lambda ranges: sum(each.saved for each in ranges))


def _chosen(buckets: tuple[int, ...], cells: dict[int, list[Cell]]) -> _Range:
    inside = [cell for each in buckets for cell in cells[each]]
    best = _Range(buckets, None, 0.0)
    for provider in dict.fromkeys(m.provider for cell in inside for m in cell.results):
        saved = _saved(provider, inside)
        if saved > best.saved:
            best = _Range(buckets, provider, saved)
    return best


def _saved(provider: str, cells: Cells) -> float:
    """Return the microseconds that a provider saves; 0 if it may be slower, wrong or no faster."""
    total, wins = 0.0, False
    for cell in cells:
        status = next((m.status for m in cell.results if m.provider == provider), "rejected")
        usual, own = cell.time(cell.default), cell.time(provider)
        if status == "rejected":
            continue  # the call runs the default
        if own is None or usual is None or own.microseconds > usual.microseconds:
            return 0.0
        wins = wins or is_faster(own, usual)
        total += cell.calls * (usual.microseconds - own.microseconds)
    return total if wins else 0.0


def _as_priorities(
    ranges: Sequence[_Range], cells: dict[int, list[Cell]], origin: str
) -> Iterator[SizeRange]:
    for this, following in itertools.zip_longest(ranges, ranges[1:]):
        limit = None
        if following is not None:
            # Numbers of tokens between two measured buckets have the default, if one side has.
            limit = this.buckets[-1] if this.provider else following.buckets[0] // 2
        inside = [cell for each in this.buckets for cell in cells[each]]
        yield SizeRange(limit, _entries(this.provider, inside, origin))


def _entries(provider: str | None, cells: Cells, origin: str) -> tuple[PriorityEntry, ...]:
    if provider is None:
        return ()
    ours, usual = 0.0, 0.0
    for cell in cells:
        own, default = cell.time(provider), cell.time(cell.default)
        if own is not None and default is not None:
            ours += cell.calls * own.microseconds
            usual += cell.calls * default.microseconds
    calls = sum(cell.calls for cell in cells if cell.time(provider) is not None)
    text = f"tuned: {ours / calls:.3g} µs against {usual / calls:.3g} µs, {origin}"
    return (PriorityEntry(provider, False, text),)
