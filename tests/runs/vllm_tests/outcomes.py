"""The outcomes of the tests, and the known differences."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

Outcomes = dict[str, str]
"""Outcomes by test id."""

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def read(path: Path) -> Outcomes:
    """Return the outcome of each test by its id."""
    found: Outcomes = json.loads(path.read_text(encoding="utf-8"))
    return found


def known_differences(path: Path) -> dict[str, str]:
    """Return the reason of each difference by test id; a line ``# reason`` precedes its tests."""
    found, reason = {}, ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            reason = line.lstrip("# ")
        elif line:
            found[line] = reason
    return found


def table(outcomes: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a table with the number of outcomes by file."""
    counts: dict[str, Counter[str]] = {}
    for test, outcome in outcomes.items():
        counts.setdefault(test.partition("::")[0], Counter())[outcome] += 1
    width = max(map(len, counts), default=5)
    yield f"{'file':{width}}  passed  failed  skipped"
    counts["total"] = sum(counts.values(), Counter())
    for file, found in counts.items():
        yield f"{file:{width}}  {found[PASSED]:6}  {found[FAILED]:6}  {found[SKIPPED]:7}"


def compare(outcomes: Mapping[str, str], known: Mapping[str, str], complete: bool) -> list[str]:
    """Return a line for each test whose outcome differs from *known*.

    With *complete*, every listed test must have run.
    """
    failed = {test for test, outcome in outcomes.items() if outcome == FAILED}
    problems = [f"failed: {test}" for test in sorted(failed - known.keys())]
    problems += [
        f"passes, but is listed as a difference: {test}"
        for test in sorted(known)
        if outcomes.get(test) == PASSED
    ]
    if complete:
        gone = [test for test in sorted(known) if outcomes.get(test) in (None, SKIPPED)]
        problems += [f"is listed as a difference, but did not run: {test}" for test in gone]
    return problems
