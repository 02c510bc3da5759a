"""Registrations of a module's classes in the other modules of its package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from opweave_vllm.migrate.imports import imports_of
from opweave_vllm.migrate.registrations import classes_of, find_registrations
from opweave_vllm.migrate.syntax import last_name


@dataclass(frozen=True)
class Elsewhere:
    """A ``register_oot`` in another file.

    Attributes:
        replaces: the class name or registered name of the layer that is replaced.
        file: the other file.
    """

    replaces: str
    file: str


def registered_elsewhere(path: Path) -> dict[str, Elsewhere]:
    """Return the classes of the module *path* that its package registers in other files."""
    top = path.resolve().parent
    while (top / "__init__.py").exists():
        top = top.parent
    parts = path.resolve().with_suffix("").relative_to(top).parts
    if len(parts) == 1:  # not in a package
        return {}
    found: dict[str, Elsewhere] = {}
    for other, module in _registering(top / parts[0]):
        if other == path.resolve():
            continue
        package = other.relative_to(top).parent.parts
        for name, replaces in _registered(module, package, ".".join(parts)):
            found.setdefault(name, Elsewhere(replaces, str(other.relative_to(top))))
    return found


@cache
def _registering(folder: Path) -> list[tuple[Path, ast.Module]]:
    """Return the modules below *folder* that register replacements."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        if b"register_oot" in content:
            with suppress(SyntaxError, ValueError):
                found.append((path, ast.parse(content)))
    return found


def _registered(
    module: ast.Module, package: tuple[str, ...], target: str
) -> Iterator[tuple[str, str]]:
    """Yield the classes of the module *target* that *module* registers, and what they replace."""
    imported = {name: _absolute(full, package) for name, full in imports_of(module).items()}
    for found in find_registrations(module, {}):
        tables = {last_name(table.targets[0]) for table in found.tables}
        classes = found.classes | {k: v for name in tables for k, v in _added(module, name)}
        for name, replaces in classes.items():
            home, _, original = imported.get(name, "").rpartition(".")
            if home == target and replaces:
                yield original, replaces


def _added(module: ast.Module, table: str) -> Iterator[tuple[str, str]]:
    """Yield the classes that are added to a table after its creation."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "update" and last_name(node.func.value) == table:
                for each in node.args:
                    if isinstance(each, ast.Dict):
                        yield from classes_of(each, {}).items()
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            if last_name(target.value) == table:
                entry = ast.Dict([target.slice], [node.value])
                yield from classes_of(entry, {}).items()


def _absolute(full: str, package: tuple[str, ...]) -> str:
    """Return the absolute name of an import in a module of *package*."""
    name = full.lstrip(".")
    level = len(full) - len(name)
    if not level:
        return full
    return ".".join([*package[: len(package) - level + 1], name])
