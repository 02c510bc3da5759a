"""Builds the native module with AddressSanitizer and UBSan, and runs the tests of its kernels.

    python tests/runs/sanitizers.py [arguments for pytest: paths, options]

The module, and what the tests compile themselves, go to ``build/sanitizers``; the packages of the
Python that runs this script are used from there. GCC only.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from environment import BUILD, Environment

FOLDER = BUILD / "sanitizers"
COMPILER = os.environ.get("CXX", "g++")
TESTS = "packages/opweave/tests/native"
UNFIT = (
    f"--deselect={TESTS}/test_kit_arguments.py::test_nothing_is_leaked",  # freed memory is kept
    f"--deselect={TESTS}/test_vec_math.py::test_errors_on_many",  # minutes, of rounding only
    # The sanitizer takes terabytes of addresses for itself.
    f"--deselect={TESTS}/test_paged_attention.py::test_without_memory_to_compute_in",
    f"--ignore={TESTS}/test_kit_cuda.py",  # nvcc does not run with the sanitizer loaded
)
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"


def install(environment: Environment) -> None:
    settings = {
        "build-dir": FOLDER / "cmake",
        "cmake.build-type": "Debug",
        "cmake.define.OPWEAVE_SANITIZE": "ON",
        "install.strip": "false",
    }
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    environment.pip("install", "--no-deps", "--force-reinstall", *options, ".")


def library(name: str) -> str:
    """Return the path of a library of the compiler."""
    command = [*shlex.split(COMPILER), f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def sanitizing_compiler() -> Path:
    """Return a compiler for what the tests build; the sanitizer is not to check itself."""
    path = FOLDER / "c++"
    path.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {COMPILER} "$@" {FLAGS}\n', "utf-8")
    path.chmod(0o755)
    return path


def main() -> int:
    environment = Environment(FOLDER / "venv")
    environment.borrow(Path(sysconfig.get_path("purelib")))
    install(environment)
    options = [
        *("-q", "-p", "no:cacheprovider", "--timeout=3000"),
        "--capture=sys",  # a report goes to the terminal, and ends the run
        f"--override-ini=testpaths={TESTS}",  # what runs where no path is given
    ]
    variables = {
        # The runtime of C++ has to be there when the sanitizer starts, for it to see exceptions.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",  # Python frees little at exit
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "CXX": str(sanitizing_compiler()),
        "TEST_NATIVE_BUILD": str(FOLDER / "cmake"),
        "TEST_EXPECT_SANITIZERS": "1",
    }
    return environment.run("-m", "pytest", *options, *UNFIT, *sys.argv[1:], **variables)


if __name__ == "__main__":
    sys.exit(main())
