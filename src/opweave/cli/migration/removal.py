"""Statements taken out of a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable


def without(node: ast.stmt, unwanted: Callable[[ast.stmt], bool]) -> ast.stmt | None:
    """Return *node*, changed: the unwanted statements are gone, and blocks that they leave empty.

    A function or class, and a block with an ``else``, stays.
    """
    return _Remover(unwanted).visit(node)  # type: ignore[return-value]


class _Remover(ast.NodeTransformer):
    def __init__(self, unwanted: Callable[[ast.stmt], bool]) -> None:
        self.unwanted = unwanted

    def visit(self, node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.stmt):
            return super().generic_visit(node)
        if self.unwanted(node):
            return None
        super().generic_visit(node)
        if getattr(node, "body", None) == []:
            if isinstance(node, (ast.If, ast.For, ast.With)) and not getattr(node, "orelse", []):
                return None
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node
