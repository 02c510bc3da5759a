"""The commands of the Makefile, without running them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands(target: str, venv: Path) -> str:
    """Return the commands of *target* with the environment *venv*."""
    command = ["make", "--dry-run", target, f"VENV={venv}"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout


def test_a_first_run_compiles_for_this_machine_and_tests_for_the_base_level_too(
    tmp_path: Path,
) -> None:
    run, test = (commands(target, tmp_path) for target in ("run", "test"))
    assert run.count("OPWEAVE_LEVELS=machine") == test.count("OPWEAVE_LEVELS=native") == 1
    assert "OPWEAVE_LEVELS=native" not in run
    (tmp_path / "native.stamp").touch()
    assert "OPWEAVE_LEVELS" not in commands("run", tmp_path)


def test_gpu_checks_first_and_collects_only_the_files_that_need_one() -> None:
    check, test, *_ = commands("gpu", Path(sys.prefix)).splitlines()
    assert check.rstrip().endswith("benchmarks/gpu.py --check")
    listing = test[test.index("$(") + 2 : test.rindex(")")]
    found = subprocess.check_output(listing, shell=True, cwd=ROOT, text=True)
    names = {Path(line).name for line in found.splitlines()}
    assert {"test_on_a_gpu.py", "test_kit_cuda.py", "test_verify.py"} <= names
