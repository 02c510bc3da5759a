"""Calls of ``register_oot`` on classes, one by one or in a loop over a dict of them."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from opweave.cli.migration.removal import without
from opweave.cli.migration.syntax import dotted, last_name, names_in

Strings = Mapping[str, str]


@dataclass
class Registration:
    """A statement that registers replacements, and maybe more in a loop.

    Attributes:
        classes: the names of the classes, and what each replaces, as far as the file says it.
        tables: the assignments of the dict that a loop goes over.
    """

    node: ast.Expr | ast.For
    classes: dict[str, str] = field(default_factory=dict)
    tables: list[ast.Assign] = field(default_factory=list)

    @property
    def statements(self) -> list[ast.stmt]:
        """The statements that do nothing but register."""
        if isinstance(self.node, ast.Expr):
            return [self.node]
        (first, *more) = self.node.body
        return [self.node, *self.tables] if not more and _registered(first) else []


def find_registrations(module: ast.Module, strings: Strings) -> list[Registration]:
    """Return the registrations anywhere in *module*; *strings* are its constants."""
    tables: dict[str, list[ast.Assign]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            tables.setdefault(last_name(node.targets[0]), []).append(node)
    return list(_find(module, tables, strings))


def mentions(module: ast.Module, registrations: Iterable[Registration]) -> Counter[str]:
    """Return how often *module* says each name where it does more than to register classes."""
    plain = {id(each): each for found in registrations for each in found.statements}
    return Counter(names_in(module)) - Counter(names_in(*plain.values()))


def unregister(module: ast.Module, registrations: Iterable[Registration], gone: Set[str]) -> None:
    """Take the classes that are *gone* out of what registers them, changing *module*."""
    registrations = list(registrations)
    used = mentions(module, registrations)
    dropped: set[ast.stmt] = set()
    for found in registrations:
        for table in found.tables:
            _shorten(_dict(table), gone)
        needed = any(used[last_name(t.targets[0])] or _dict(t).keys for t in found.tables)
        if found.classes and found.classes.keys() <= gone and not needed:
            dropped.update(found.statements)
    kept = (without(each, lambda statement: statement in dropped) for each in module.body)
    module.body = [each for each in kept if each is not None]


def string(node: ast.expr, strings: Strings) -> str | None:
    """Return the string that *node* is, or that the module's constant of that name is."""
    if isinstance(node, ast.Name):
        return strings.get(node.id)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def name_argument(call: ast.Call, strings: Strings) -> str | None:
    """Return the name that ``register`` or ``register_oot`` is given, if it is known."""
    given = [*call.args, *(each.value for each in call.keywords if each.arg in ("name", None))]
    return next(filter(None, (string(each, strings) for each in given)), None)


def _find(
    node: ast.AST, tables: Mapping[str, list[ast.Assign]], strings: Strings
) -> Iterator[Registration]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.For) and _is_loop(child):
            yield _loop(child, tables, strings)
        elif isinstance(child, ast.Expr) and (name := _registered(child)):
            yield Registration(child, {name: _replaced(child.value, strings)})  # type: ignore[arg-type]
        elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _find(child, tables, strings)


def _registered(statement: ast.AST) -> str:
    """Return the name of the class in ``X.register_oot(cls, name=...)``; empty: it is none."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return ""
    if call.func.attr != "register_oot":
        return ""
    classes = [*call.args, *(each.value for each in call.keywords if each.arg != "name")]
    return next(filter(None, map(last_name, classes)), "")


def _replaced(call: ast.Call, strings: Strings) -> str:
    """Return what the call says is to be replaced, or an empty string if it is computed."""
    if len(call.args) > 1 or any(each.arg == "name" for each in call.keywords):
        return name_argument(call, strings) or ""
    return dotted(call.func).split(".")[-2]


def _is_loop(node: ast.For) -> bool:
    """Say whether a loop registers what it goes over."""
    targets = set(names_in(node.target))
    return any(_registered(each) in targets for each in ast.walk(node))


def _loop(node: ast.For, tables: Mapping[str, list[ast.Assign]], strings: Strings) -> Registration:
    found = Registration(node)
    for name in names_in(node.iter):
        for table in tables.get(name, ()):
            found.tables.append(table)
            found.classes |= _classes(_dict(table), strings)
    return found


def _dict(table: ast.Assign) -> ast.Dict:
    assert isinstance(table.value, ast.Dict)
    return table.value


def _classes(table: ast.Dict, strings: Strings) -> dict[str, str]:
    pairs = zip(table.keys, table.values, strict=True)
    named = ((last_name(value), key and string(key, strings)) for key, value in pairs)
    return {name: replaced for name, replaced in named if name and replaced}


def _shorten(table: ast.Dict, gone: Set[str]) -> None:
    pairs = zip(table.keys, table.values, strict=True)
    left = [(key, value) for key, value in pairs if last_name(value) not in gone]
    table.keys, table.values = [key for key, _ in left], [value for _, value in left]
