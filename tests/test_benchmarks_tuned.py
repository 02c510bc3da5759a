"""``benchmarks/tuned.py``: the engine with a tuning file against the engine without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "models" / "tiny-pydoc"


def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tuned.py", *options],
        check=False, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("nowhere", "tuning.json"), "nowhere has no config.json"),
        ((MODEL, "nowhere.json"), "nowhere.json is not a file; opweave tune makes it"),
    ],
)
def test_missing_files_are_named(options: tuple[str | Path, ...], message: str) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert message in done.stderr


def test_each_workload_that_fits_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(
        json.dumps({"format": "opweave tuning", "version": 1, "machines": []}), encoding="utf-8"
    )
    done = run(MODEL, file, "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(rows) == ["tuned.decode/1", "tuned.decode/8", "tuned.prompt/128"]  # of 256 tokens
    assert all(row["value"] > 0 and row["ratio"] > 0 for row in rows.values())
