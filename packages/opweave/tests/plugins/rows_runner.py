"""Runs each row of test_broken.py in a fork of this process, and says how it ended.

Run by a fresh interpreter, and by a child that it spawns: neither has used opweave before.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import opweave.platforms
import opweave.plugins  # noqa: F401


def run(rows: list[dict[str, Any]], folder: str) -> dict[str, dict[str, Any]]:
    """Return for each row: the error's type and message, or the result; warnings."""
    return {row["name"]: _in_fork(row, Path(folder) / row["name"]) for row in rows}


def run_into(rows: list[dict[str, Any]], folder: str, path: str) -> None:
    """The same into a file, for a child process."""
    Path(path).write_text(json.dumps(run(rows, folder)), encoding="utf-8")


def _in_fork(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    for path, text in row["files"].items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    if not (child := os.fork()):
        try:
            sys.path.insert(0, str(folder))
            os.environ.update(row["env"])
            result.write_text(json.dumps(_outcome(row["code"])), encoding="utf-8")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _outcome(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    outcome: dict[str, Any] = {"error": None, "message": ""}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            exec(code, names)
        except Exception as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
    outcome["result"] = names.get("result")
    outcome["warnings"] = [str(each.message) for each in heard]
    return outcome
