"""Helpers for abstract syntax trees."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator

Function = ast.FunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def dotted(node: ast.expr) -> str:
    """Return the text of a dotted name such as ``a.b.c``, or "" for other expressions."""
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return start and f"{start}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.expr) -> str:
    """Return ``c`` for ``a.b.c``, or "" if it is not a dotted name."""
    return dotted(node).rpartition(".")[2]


def attribute_of_self(node: ast.AST) -> str:
    """Return ``a`` for ``self.a``, or "" for other expressions."""
    is_it = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if is_it and node.value.id == "self" else ""  # type: ignore[attr-defined]


def is_torch_op(value: ast.expr) -> bool:
    """Return whether *value* names a torch op."""
    return dotted(value).startswith("torch.ops.")


def annotation_text(annotation: ast.expr) -> str:
    """Return the source of an annotation, without quotes around it."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


def is_static(method: Function) -> bool:
    """Return whether a method is a static method."""
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in method.decorator_list)


def own_parameters(method: Function) -> list[tuple[ast.arg, ast.expr | None]]:
    """Return the positional parameters of a method without ``self``, with their defaults."""
    parameters = [*method.args.posonlyargs, *method.args.args]
    missing: list[ast.expr | None] = [None] * (len(parameters) - len(method.args.defaults))
    pairs = list(zip(parameters, [*missing, *method.args.defaults], strict=True))
    return pairs if is_static(method) else pairs[1:]


def is_docstring(statement: ast.stmt) -> bool:
    """Return whether a statement is a docstring or another constant."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def names_in(*nodes: ast.AST) -> Iterator[str]:
    """Yield every occurrence of a name in *nodes*."""
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                yield part.id


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes in the body of *function*, without those of nested functions and classes."""
    waiting: deque[ast.AST] = deque(function.body)
    while waiting:
        node = waiting.popleft()
        yield node
        if not isinstance(node, _SCOPES):
            waiting.extend(ast.iter_child_nodes(node))
