"""``benchmarks/libraries.py``: opweave's kernels against those of a library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "libraries.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, *options],
        check=False, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_unknown_library_is_refused() -> None:
    done = run("--library", "acme")
    assert done.returncode == 2
    assert "no op has an implementation by 'acme'; is the library installed?" in done.stderr


def test_unknown_op_is_refused() -> None:
    done = run("--library", "opweave_c_invariant", "--ops", "linear", "acme")
    assert done.returncode == 2
    assert "--ops acme: opweave_c_invariant implements linear" in done.stderr


def test_library_is_compared_with_the_default_provider() -> None:
    # Of another provider of this package, so that the test does not depend on an installed library.
    library = "opweave_c_invariant"
    sizes = ("--ops", "linear", "--dtypes", "float32", "--tokens", "1")
    done = run("--library", library, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    assert rows
    for row in rows:
        assert row["provider"] != library
        assert row["ratio"] > 0
        assert abs(row["baseline"] / row["value"] / row["ratio"] - 1) < 0.01
