"""Results as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from runs.families.compare import Result


def row(result: Result, width: int) -> str:
    """Return a result as one line, with the name in *width* characters."""
    line = f"{result.name:<{width}}  {result.ran:<10}  {result.seconds:4.1f} s  {result.status}"
    return f"{line}: {result.detail}" if result.detail else line


def summary(results: Sequence[Result]) -> str:
    """Return how many results have each status, and how the equal ones ran."""
    ways = Counter(result.ran for result in results if result.status == "equal" and result.ran)
    statuses = Counter(result.status for result in results)
    return "\n".join(
        ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        for counts in (statuses, ways)
        if counts
    )
