"""The commands of the Makefile, without running them."""

from __future__ import annotations

import os
import subprocess
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
