"""The compilers of this machine."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from opweave.native.errors import NativeBuildError


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler's command, and the output of its ``--version``."""

    command: tuple[str, ...]
    version: str


def cxx() -> Compiler:
    """Return the C++ compiler: ``$CXX``, or else the first of c++, g++ and clang++.

    Raises:
        NativeBuildError: no compiler was found.
    """
    return _compiler(_command("CXX", ("c++", "g++", "clang++"), "a C++17 compiler"))


def nvcc() -> Compiler:
    """Return the CUDA compiler: ``$CUDACXX``, nvcc on the path, or that of ``$CUDA_HOME``.

    Raises:
        NativeBuildError: no compiler was found.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return _compiler(_command("CUDACXX", ("nvcc", f"{home}/bin/nvcc"), "nvcc, the CUDA compiler"))


def nm() -> str:
    """Return the program that lists the symbols of an object, as the C++ compiler names it."""
    found = run((*cxx().command, "-print-prog-name=nm")).stdout.strip()
    return found or "nm"


def python_include() -> Path:
    """Return the folder of Python.h.

    Raises:
        NativeBuildError: Python's headers are not installed.
    """
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        raise NativeBuildError(
            f"Python.h is not in {folder}; install Python's headers (Debian: python3-dev)."
        )
    return folder


def run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run *command* and return its exit code and output.

    Raises:
        NativeBuildError: it cannot be started.
    """
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise NativeBuildError(f"Cannot run {command[0]}: {error.strerror}.") from error


def _command(variable: str, names: tuple[str, ...], what: str) -> tuple[str, ...]:
    value = os.environ.get(variable, "")
    try:
        chosen = shlex.split(value)
    except ValueError as error:
        raise NativeBuildError(f"{variable}={value} is not a command: {error}.") from error
    for name in chosen[:1] or names:
        path = shutil.which(name)
        if path:
            return (path, *chosen[1:])
    if chosen:
        raise NativeBuildError(f"{variable}={shlex.join(chosen)}: program {chosen[0]} not found.")
    raise NativeBuildError(
        f"Building needs {what}, but {', '.join(names)} was not found; install one, or name it in "
        f"{variable}."
    )


@functools.cache
def _compiler(command: tuple[str, ...]) -> Compiler:
    asked = run((*command, "--version"))
    if asked.returncode != 0:
        raise NativeBuildError(f"{shlex.join(command)} --version fails.", asked.stderr)
    return Compiler(command, asked.stdout.strip())
