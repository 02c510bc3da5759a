"""``benchmarks/libraries.py`` and ``benchmarks/tuned.py``: another provider, a tuning file."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from support import ROOT
from support.warm_python import warm_python

MODEL = ROOT / "examples" / "models" / "tiny-pydoc"
# Of another provider of this package, so that the test does not depend on an installed library.
LIBRARY = "opweave_c_invariant"


def run(program: str, *options: str | Path) -> CompletedProcess[str]:
    return warm_python().run(ROOT / "benchmarks" / program, *options)


@pytest.mark.parametrize(("program", "options", "message"), [
    ("libraries.py", ("--library", "acme"),
     "no op has an implementation by 'acme'; is the library installed?"),
    ("libraries.py", ("--library", LIBRARY, "--ops", "linear", "acme"),
     f"--ops acme: {LIBRARY} implements linear"),
    ("tuned.py", ("nowhere", "tuning.json"), "nowhere has no config.json"),
    ("tuned.py", (MODEL, "nowhere.json"), "nowhere.json is not a file; opweave tune makes it"),
])  # fmt: skip
def test_wrong_arguments_are_named(
    program: str, options: tuple[str | Path, ...], message: str
) -> None:
    done = run(program, *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_library_is_compared_with_the_default_provider() -> None:
    sizes = ("--ops", "linear", "--dtypes", "float32", "--tokens", "1")
    done = run("libraries.py", "--library", LIBRARY, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert rows
    for row in rows:
        assert row["provider"] != LIBRARY
        assert row["ratio"] > 0
        assert abs(row["baseline"] / row["value"] / row["ratio"] - 1) < 0.01


def test_each_workload_that_fits_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(json.dumps({"format": "opweave tuning", "version": 1, "machines": []}))
    done = run("tuned.py", MODEL, file, "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(rows) == ["tuned.decode/1", "tuned.decode/8", "tuned.prompt/128"]  # of 256 tokens
    assert all(row["value"] > 0 and row["ratio"] > 0 for row in rows.values())
