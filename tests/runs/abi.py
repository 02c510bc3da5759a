"""Builds one wheel without torch, and runs the tests of its ops under several versions of torch.

    python tests/runs/abi.py 2.11.0 2.13.0 2.15.0@python3.12

Each version gets a virtual environment in ``build/abi``, with the Python that is named, and the
wheel. The tests there import what is installed, not the source tree.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from environment import BUILD, Environment

FOLDER = BUILD / "abi"
TESTS = (
    "packages/opweave/tests/native",
    "packages/opweave/tests/ir",
    "packages/opweave/tests/layers",
    "packages/opweave/tests/compile",
)

CHECK_INSTALL = """
import platform, sys
import torch, opweave
from opweave import native

status = native.status()
print(f"torch {torch.__version__}, CPython {platform.python_version()}, {status.path}")
assert opweave.__file__.startswith(sys.prefix), f"not the installed wheel: {opweave.__file__}"
assert torch.__version__.split("+")[0] == sys.argv[1], f"asked for torch {sys.argv[1]}"
assert status.available and status.torch_ops and status.fast_call, status
"""


def build_wheel() -> Path:
    """Build the wheel in pip's isolated environment, which has what pyproject.toml asks for."""
    builder = Environment(FOLDER / "builder")
    if builder.run("-c", "import importlib.util as u; exit(u.find_spec('torch') is not None)"):
        raise SystemExit(f"{builder.folder} has torch; remove it, so that it is created again")
    wheels = FOLDER / "wheels"
    for old in wheels.glob("opweave-*.whl"):
        old.unlink()
    builder.pip("wheel", "--no-deps", f"--config-settings=build-dir={FOLDER / 'cmake'}",
                "--wheel-dir", wheels, "packages/opweave")  # fmt: skip
    [wheel] = wheels.glob("opweave-*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def passes(wheel: Path, version: str, python: str) -> bool:
    """Install *wheel* with torch *version*, and run the tests."""
    environment = Environment(FOLDER / f"torch-{version}", python)
    engine = [f"packages/{name}" for name in ("opweave-engine", "opweave-vllm")]
    environment.pip("install", wheel, *engine, "-r", "requirements-dev.txt", f"torch=={version}")
    environment.pip("install", "--no-deps", "--force-reinstall", wheel)
    if environment.run("-c", CHECK_INSTALL, version):
        return False
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not timed"]
    variables = {"TEST_NATIVE_BUILD": str(FOLDER / "cmake")}
    return not environment.run("-m", "pytest", *options, *TESTS, **variables)


def main() -> int:
    parser = argparse.ArgumentParser(description="Test one wheel under several versions of torch.")
    parser.add_argument("versions", nargs="+", metavar="VERSION[@PYTHON]")
    wheel = build_wheel()
    failed = []
    for argument in parser.parse_args().versions:
        version, _, python = argument.partition("@")
        start = time.monotonic()
        if not passes(wheel, version, python or sys.executable):
            failed.append(version)
        print(f"torch {version}: {'failed' if version in failed else 'passed'}, "
              f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
