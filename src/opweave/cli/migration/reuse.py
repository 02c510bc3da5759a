"""Methods that work in place, which ops may not."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from opweave.cli.migration.source import Function


def changed_or_returned(function: Function) -> str | None:
    """Return which argument of *function* it changes in place, or returns as it is; None: none.

    Arguments that it gives another value are left out: what a name stands for is not known then.
    """
    assigned = {name for node in ast.walk(function) for name in _assigned(node)}
    arguments = {arg.arg for arg in function.args.args[1:]} - assigned
    found = (name for node in ast.walk(function) for name in _given_back(node))
    return next((name for name in found if name in arguments), None)


def _assigned(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Assign, ast.For)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from _names(target)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        yield from _names(node.target)


def _given_back(node: ast.AST) -> Iterator[str]:
    """Yield the names of what a statement writes to, or returns."""
    if isinstance(node, ast.Return) and node.value is not None:
        yield from _names(node.value)
    elif isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript) or isinstance(node, ast.AugAssign):
                yield from _names(_whole(target))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        if method.endswith("_") and not method.endswith("__"):
            yield from _names(node.func.value)


def _whole(target: ast.expr) -> ast.expr:
    """Return ``x`` for ``x[0][1]``."""
    return _whole(target.value) if isinstance(target, ast.Subscript) else target


def _names(value: ast.expr) -> Iterator[str]:
    """Yield the names that *value* is, or one of them, as in ``(a, b)`` and ``a if c else b``."""
    if isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, ast.Tuple):
        for item in value.elts:
            yield from _names(item)
    elif isinstance(value, ast.IfExp):
        yield from _names(value.body)
        yield from _names(value.orelse)
