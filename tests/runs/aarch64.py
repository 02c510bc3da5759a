"""Cross-compile the kernels for aarch64, and test them in QEMU's user mode.

Neither torch nor Python is needed for aarch64: the test program compares the kernels with scalar
definitions (``packages/opweave/tests/native/sources/kernel_test.cpp``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "aarch64"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user", "cmake": "cmake"}
PACKAGES["ninja"] = "ninja-build"


def main() -> None:
    # The environment of `make test` has CMake and Ninja.
    path = os.pathsep.join([str(ROOT / ".venv" / "bin"), os.environ["PATH"]])
    missing = [package for tool, package in PACKAGES.items() if not shutil.which(tool, path=path)]
    if missing:
        names = " ".join(missing)
        sys.exit(f"make test-aarch64 needs these Debian packages: apt-get install {names}")
    environment = {**os.environ, "PATH": path}

    def run(*command: object) -> None:
        subprocess.run([str(part) for part in command], check=True, env=environment)

    run(
        *(
            "cmake",
            "-S",
            ROOT / "packages" / "opweave",
            "-B",
            BUILD,
            "-G",
            "Ninja",
            "-DOPWEAVE_KERNEL_TEST=ON",
        ),
        *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"),
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
    )
    run("cmake", "--build", BUILD, "--parallel", "2")
    run(EMULATOR, BUILD / "kernel_test")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
