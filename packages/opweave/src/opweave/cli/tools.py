"""Optional tools and packages that ``opweave doctor`` looks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from opweave.native import NativeBuildError, toolchain

_SERVING = "opweave generate, chat, explain and serve"
_REQUIREMENT = re.compile(r"([\w.-]+).*;.*extra == ['\"](\w+)['\"]")


@dataclass(frozen=True)
class Tool:
    """An optional dependency.

    Attributes:
        name: name for the user.
        found: its version, or None if it is missing.
        needed_for: features that need it.
        fix: how to install it.
        required: whether doctor reports a problem if it is missing.
    """

    name: str
    found: str | None
    needed_for: str
    fix: str
    required: bool = False

    @property
    def problem(self) -> str:
        return f"{self.name} is missing: {self.needed_for} will not work. {self.fix}"


def tools() -> list[Tool]:
    """Return the C++ compiler, Python's headers, Triton and the packages of ``opweave[serve]``."""
    return [_compiler(), _headers(), _triton(), _serving()]


def _compiler() -> Tool:
    try:
        found = toolchain.cxx().version.partition("\n")[0]
    except NativeBuildError:
        found = None
    return Tool(
        "C++ compiler",
        found,
        "torch.compile on the CPU, opweave native build",
        "Install g++ or clang++, or set CXX.",
        required=True,
    )


def _headers() -> Tool:
    try:
        found = str(toolchain.python_include())
    except NativeBuildError:
        found = None
    return Tool(
        "Python headers",
        found,
        "torch.compile on the CPU, opweave native build",
        "Install Python.h (Debian: python3-dev).",
    )


def _triton() -> Tool:
    return Tool("Triton", installed_version("triton"), "the provider triton", "pip install triton")


def _serving() -> Tool:
    packages = list(_extra("serve"))
    missing = [package for package in packages if installed_version(package) is None]
    return Tool(
        f"opweave[serve]{' (' + ', '.join(missing) + ')' if missing else ''}",
        None if missing else f"{len(packages)} packages",
        _SERVING,
        "pip install 'opweave[serve]'",
    )


def _extra(name: str) -> Iterator[str]:
    for requirement in requires("opweave") or ():
        match = _REQUIREMENT.match(requirement)
        if match and match[2] == name:
            yield match[1]


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
