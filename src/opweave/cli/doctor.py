"""``opweave doctor``: what is installed, what was found, what is wrong."""

from __future__ import annotations

import platform as python_platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from opweave import native
from opweave.cli.output import out, print_json
from opweave.config import current_compilation_config, environment, file
from opweave.ir import current_registry
from opweave.ir.errors import IrError
from opweave.platforms import current_platform

_PACKAGES = ("opweave", "torch", "safetensors", "tokenizers", "numpy", "cyclopts", "rich")


def doctor(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Show versions, the platform, the native module, and what is wrong, if anything.

    Exits with 1 if a problem was found.

    Parameters
    ----------
    json
        Print JSON.
    """
    report = examine()
    if json:
        print_json(report)
    else:
        _print(report)
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Return everything that ``doctor`` shows, as plain data."""
    status, problems = native.status(), _problems()
    return {
        "versions": {"python": python_platform.python_version(), **_versions()},
        "platform": {"name": current_platform.name, "device_type": current_platform.device_type},
        "native": asdict(status),
        "config_file": _config_file(),
        "environment": environment.in_use(),
        "problems": problems,
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _config_file() -> str | None:
    try:
        path = file.find().path
    except IrError:
        return None  # among the problems
    return str(path) if path else None


def _problems() -> list[str]:
    problems = []
    status = native.status()
    if not status.available:
        problems.append(
            f"The native module is missing: {status.reason_missing}. Ops run without it."
        )
    for check in (current_registry().check_settings, current_compilation_config):
        try:
            check()
        except IrError as error:
            problems.append(str(error))
    problems += [
        f"{name} is set, but opweave knows no such variable."
        for name in environment.unknown_names()
    ]
    return list(dict.fromkeys(problems))  # a file that cannot be read is one problem


def _print(report: dict[str, Any]) -> None:
    for section in ("versions", "platform", "native", "environment"):
        out.print(f"[bold]{section}[/]")
        for key, value in report[section].items():
            out.print(f"  {key:<22} {escape(_show(value))}")
    out.print(f"[bold]config file[/]\n  {escape(_show(report['config_file']))}")
    if report["problems"]:
        out.print("[bold red]problems[/]")
        for problem in report["problems"]:
            out.print(f"  {escape(problem)}")
    else:
        out.print("[bold green]no problems[/]")


def _show(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return {None: "-", True: "yes", False: "no"}.get(value, str(value))
