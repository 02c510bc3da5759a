"""Small questions about syntax trees."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator

Function = ast.FunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for that, and an empty string for anything but a dotted name."""
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return start and f"{start}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.expr) -> str:
    """Return ``c`` for ``a.b.c``, and an empty string for anything but a dotted name."""
    return dotted(node).rpartition(".")[2]


def attribute_of_self(node: ast.AST) -> str:
    """Return ``a`` for ``self.a``, and an empty string for anything else."""
    is_it = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if is_it and node.value.id == "self" else ""  # type: ignore[attr-defined]


def is_torch_op(value: ast.expr) -> bool:
    """Say whether *value* is the name of one of torch's ops."""
    return dotted(value).startswith("torch.ops.")


def is_docstring(statement: ast.stmt) -> bool:
    """Say whether a statement does nothing but say something."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def names_in(*nodes: ast.AST) -> Iterator[str]:
    """Yield every name in *nodes*, read or bound, as often as it is there."""
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                yield part.id


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield what is in the body of *function*, but in no function or class inside it."""
    waiting: deque[ast.AST] = deque(function.body)
    while waiting:
        node = waiting.popleft()
        yield node
        if not isinstance(node, _SCOPES):
            waiting.extend(ast.iter_child_nodes(node))
