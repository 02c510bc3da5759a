"""The results as tables and as one JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_queue.job import Row
from gpu_queue.plan import Planned
from gpu_queue.state import PASSED, Record
from harness import describe_machine

OURS = ("opweave", "triton")  # what the names of our contenders begin with
COUNTED = ("smoke", "conformance", "compiled")  # stages of hundreds of jobs
HEADING = ("measured", "case", "contender", "value", "unit", "of the limit", "against")


def rows_of(records: Mapping[str, Record]) -> list[Row]:
    """Return every row with where and when it was found, ours with the best other's as baseline."""
    rows = [
        {**row, "job": name, "machine": r.machine, "torch": r.torch, "date": r.date}
        for name, r in records.items()
        for row in r.rows
    ]
    return [{**row, **_comparison(row, rows)} for row in rows]


def _comparison(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the best of others that was measured in the same case on the same machine."""
    if not _is_ours(row) or "value" not in row:
        return {}
    same = ("name", "case", "machine", "torch")
    others = [
        other
        for other in rows
        if "contender" in other
        and "value" in other
        and not _is_ours(other)
        and all(other[key] == row[key] for key in same)
    ]
    if not others or not row["value"]:
        return {}
    more_is_better = row["unit"].endswith("/s")
    best = (max if more_is_better else min)(others, key=lambda other: other["value"])
    ratio = row["value"] / best["value"]
    return {
        "baseline": best["value"],
        "against": best["contender"],
        "ratio": float(f"{ratio if more_is_better else 1 / ratio:.3g}"),
    }


def _is_ours(row: Row) -> bool:
    return str(row.get("contender", "")).startswith(OURS)


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table below :data:`HEADING`."""
    share = f"{row['limit_share']:.0%}" if "limit_share" in row else ""
    against = f"{row['ratio']} x {row['against']}" if "ratio" in row else ""
    shown = [row.get(key, "") for key in ("name", "case", "contender", "value", "unit")]
    return (*map(str, shown), share, against)


def measured(records: Mapping[str, Record]) -> list[Row]:
    """Return the rows of jobs that measure or compare, without those that are only counted."""
    return [row for row in rows_of(records) if row["name"] not in COUNTED and "value" in row]


def counts(records: Mapping[str, Record]) -> list[tuple[str, str, str]]:
    """Return how the jobs of the counted stages ended: stage, provider, and numbers in words."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for name, record in records.items():
        stage, _, subject = name.partition("/")
        if stage in COUNTED:
            counter = found.setdefault((stage, subject.rpartition(":")[2]), Counter())
            skipped = record.status == PASSED and not any(row.get("value") for row in record.rows)
            counter["not applicable" if skipped else record.status] += 1
    order = {stage: index for index, stage in enumerate(COUNTED)}
    return [
        (stage, provider, ", ".join(f"{count} {status}" for status, count in numbers.items()))
        for (stage, provider), numbers in sorted(
            found.items(), key=lambda item: (order[item[0][0]], item[0][1])
        )
    ]


def problems(records: Mapping[str, Record]) -> list[tuple[str, str, str]]:
    """Return the jobs that did not pass: name, status, problem."""
    return [
        (name, record.status, record.problem)
        for name, record in records.items()
        if record.status != PASSED
    ]


def page(records: Mapping[str, Record]) -> str:
    """Return the page of results, as Markdown."""
    return "\n".join(_page(records)) + "\n"


def _page(records: Mapping[str, Record]) -> Iterator[str]:
    yield "# GPU results"
    yield ""
    yield "Written by `make gpu`; everything, with machine and date of each row, is in"
    yield "[gpu_queue.json](gpu_queue.json)."
    yield ""
    for place in dict.fromkeys(record.place for record in records.values()):
        yield f"- {place}"
    yield ""
    yield from _table(("stage", "provider", "jobs"), counts(records))
    yield from _table(HEADING, [cells(row) for row in measured(records)])
    yield from _table(
        ("did not pass", "status", "problem"),
        [(name, status, problem.partition("\n")[0]) for name, status, problem in problems(records)],
    )


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield f"| {' | '.join(heading)} |"
        yield f"|{'---|' * len(heading)}"
        for row in rows:
            yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"
        yield ""


def log(records: Mapping[str, Record]) -> str:
    """Return the end of the output of every job that did not pass."""
    return "\n\n".join(
        f"{name}: {status}\n{problem}" for name, status, problem in problems(records)
    )


def as_json(planned: Sequence[Planned], records: Mapping[str, Record]) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    return {
        "machine": describe_machine(),
        "rows": rows_of(records),
        "jobs": [
            {
                "name": each.job.name,
                "stage": each.job.stage,
                "limit": each.job.limit,
                "expected": each.expected,
                "state": each.state,
                "why": each.why,
                **({"status": found.status, "seconds": found.seconds, "problem": found.problem}
                   if (found := records.get(each.job.name)) else {}),
            }
            for each in planned
        ],
    }  # fmt: skip
