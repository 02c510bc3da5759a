"""The compilers of this machine, the kit's headers, and the inputs of a build."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from opweave.ir.errors import OpweaveError

# Errors of building and loading native modules.


class NativeBuildError(OpweaveError, RuntimeError):
    """A native module cannot be built.

    Attributes:
        summary: one line with the problem and how to fix it.
        log: the compiler's messages, if it ran.
    """

    def __init__(self, summary: str, log: str = "") -> None:
        super().__init__(f"{summary}\n{log}" if log else summary)
        self.summary = summary
        self.log = log


class NativeImportError(OpweaveError, ImportError):
    """A native module cannot be imported because it is not built, or torch rejects its ops."""


# The compilers of this machine.


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
    program = run((*cxx().command, "-print-prog-name=nm")).stdout.strip()
    return program or "nm"


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


def _command(variable: str, names: tuple[str, ...], description: str) -> tuple[str, ...]:
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
        f"Building needs {description}, but {', '.join(names)} was not found; install one, or name "
        f"it in {variable}."
    )


@functools.cache
def _compiler(command: tuple[str, ...]) -> Compiler:
    result = run((*command, "--version"))
    if result.returncode != 0:
        raise NativeBuildError(f"{shlex.join(command)} --version fails.", result.stderr)
    return Compiler(command, result.stdout.strip())


# The headers and sources of the kit, which are part of the package.


# For builds without these commands, and for opweave's own module.
_EXCLUDED_SOURCES = ("module_init.cpp", "plain_call.cpp")


def include_dir() -> Path:
    """Return the folder that holds ``opweave/extension.h``, for ``-I``.

    Raises:
        NativeBuildError: the headers are not installed.
    """
    # In an editable install, CMake installs its files apart from the Python files.
    folders = list(sys.modules[__name__.partition(".")[0]].__path__)
    for folder in folders:
        if (Path(folder) / "include" / "opweave" / "extension.h").is_file():
            return Path(folder) / "include"
    raise NativeBuildError(
        f"opweave/extension.h was not found in {', '.join(folders)}; reinstall opweave."
    )


def core_sources() -> list[Path]:
    """Return the kit's sources that all modules share."""
    paths = sorted((include_dir() / "opweave").glob("*.cpp"))
    return [path for path in paths if path.name not in _EXCLUDED_SOURCES]


@functools.cache
def fingerprint() -> str:
    """Return a hash of every file of the kit."""
    digest = hashlib.sha256()
    folder = include_dir() / "opweave"
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".h", ".cpp"):
            name = path.relative_to(folder).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


# Sources that are compiled once per instruction set; see ``opweave/simd.h`` of the kit.


# Products and sums must round alike on every level. Exceptions would need symbols that all levels
# share. Loops start where processors fetch instructions.
FLAGS = (
    "-fno-exceptions",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-falign-loops=32",
    # GCC's own AVX-512 headers trip these warnings (GCC bug 105593); Clang has no such option.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-warning-option",
)

_LEVELS = {
    "x86_64": {
        "avx512bf16": ("-march=x86-64-v4", "-mavx512bf16"),
        "avx512": ("-march=x86-64-v4",),
        "avx2": ("-march=x86-64-v3",),
        "base": ("-march=x86-64-v2",),
    }
}
_DEFAULT_LEVELS: Mapping[str, tuple[str, ...]] = {"base": ()}


def levels() -> Mapping[str, tuple[str, ...]]:
    """Return the levels of this architecture, with the compiler flags of each."""
    machine = platform.machine()
    return _LEVELS.get("x86_64" if machine == "AMD64" else machine, _DEFAULT_LEVELS)


def check_symbols(source: Path, objects: Iterable[Path]) -> None:
    """Check that objects of *source* have no symbols of which the linker keeps one for all levels.

    Raises:
        NativeBuildError: they have one, or it cannot be checked.
    """
    for path in objects:
        listing = run((nm(), "-C", str(path)))
        if listing.returncode != 0:
            raise NativeBuildError(f"Cannot read the symbols of {path}.", listing.stderr)
        for line in listing.stdout.splitlines():
            # 16 digits or blanks, a blank, the kind (weak or unique), a blank, the name
            if line[17:18] in ("W", "V", "u"):
                raise NativeBuildError(
                    f"{source.name} has the function {line[19:]}, of which the linker keeps one "
                    "copy for all instruction sets; put it into an anonymous namespace, or do not "
                    "use it in a SIMD source."
                )
