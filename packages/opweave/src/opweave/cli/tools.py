"""Optional tools and packages that ``opweave doctor`` looks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from opweave.native import NativeBuildError, toolchain

_COMPANIONS = {
    "opweave-engine": "opweave generate, chat, explain and serve",
    "opweave-vllm": "opweave migrate, and opweave's kernels in vLLM",
}
_NAME = re.compile(r"[\w.-]+")


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
    """Return the C++ compiler, Python's headers, Triton, and the packages that extend opweave."""
    companions = [_companion(package, use) for package, use in _COMPANIONS.items()]
    return [_compiler(), _headers(), _triton(), *companions]


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


def _companion(package: str, use: str) -> Tool:
    missing = [name for name in _required(package) if installed_version(name) is None]
    return Tool(
        f"{package}{' (' + ', '.join(missing) + ')' if missing else ''}",
        None if missing else installed_version(package),
        use,
        f"pip install {package}",
    )


def _required(package: str) -> Iterator[str]:
    if installed_version(package) is None:
        return
    for requirement in requires(package) or ():
        if "extra ==" not in requirement and (name := _NAME.match(requirement)):
            yield name[0]


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
