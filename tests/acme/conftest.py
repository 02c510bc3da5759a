"""The example device, installed into a folder of its own: on the path it is there, else not."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "acme-device"
COMMAND = "import sys; from opweave.cli import main; main(sys.argv[1:])"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the example is installed in, and nothing else.

    What the compiler makes of it is kept in pytest's cache, for the torch and Python at hand.
    """
    compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C++ compiler: {compiler}")
    cache = request.config.cache
    kept = (
        tmp_path_factory.mktemp("acme")
        if cache is None
        else cache.mkdir(f"acme-{torch.__version__}-{sys.implementation.cache_tag}")
    )
    target = tmp_path_factory.mktemp("site")
    with open(kept / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(_fresh_source(kept / "source"), target)
    return target


def _fresh_source(folder: Path) -> Path:
    """Copy the example there, with the times of its files, next to what was built before."""
    for path in folder.glob("*"):
        if path.name != "build":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for package in folder.glob("build/lib*/*"):
        for path in package.rglob("*.py"):
            path.unlink()
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True, ignore=ignored)
    return folder


def _install(source: Path, target: Path) -> None:
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *flags, "--target", target, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def environment(site: Path | None, **others: str) -> dict[str, str]:
    """Return the environment of a process that finds what is installed in *site*, if given."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPWEAVE_", "ACME_"))}
    paths = [*([str(site)] if site else []), *(p for p in sys.path if p)]
    return {**clean, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", **others}


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Run Python: ``python(*arguments, site=None, **environment)``.

    With *site*, what is installed there is on the path.
    """

    def run(
        *arguments: str | Path,
        site: Path | None = None,
        check: bool = True,
        cwd: Path = tmp_path,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment(site, **(env or {})),
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=800,
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def opweave(python: Run) -> Run:
    """Run the command line in an interpreter of its own: ``opweave("doctor", site=site)``."""
    return lambda *arguments, **options: python("-c", COMMAND, *arguments, **options)
