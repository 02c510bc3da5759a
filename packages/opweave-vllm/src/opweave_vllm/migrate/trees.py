"""Concrete syntax trees, which keep comments and formatting."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider

Position = tuple[int, int]  # line and column in characters
Statement: TypeAlias = cst.SimpleStatementLine | cst.BaseCompoundStatement
_Statement = TypeVar("_Statement", bound=Statement)


def positions_of(module: cst.Module) -> Mapping[cst.CSTNode, Position]:
    """Return where each node of *module* starts."""
    found = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
    return {node: (at.start.line, at.start.column) for node, at in found.items()}


def position(node: ast.stmt | ast.expr, lines: Sequence[str]) -> Position:
    """Return where an abstract node starts; Python counts columns in bytes."""
    line = lines[node.lineno - 1]
    return node.lineno, len(line.encode()[: node.col_offset].decode())


def methods_of(node: cst.ClassDef) -> dict[str, cst.FunctionDef]:
    """Return the functions that a class defines, by name."""
    return {each.name.value: each for each in node.body.body if isinstance(each, cst.FunctionDef)}


def target_name(target: cst.AssignTarget) -> str:
    """Return ``a.b`` for the target ``a.b``, and an empty string if it is not a dotted name."""
    node = target.target
    return get_full_name_for_node(node) or "" if isinstance(node, (cst.Name, cst.Attribute)) else ""


def statement(text: str) -> Statement:
    """Return the statement *text*."""
    return cst.parse_statement(text)


def spaced(
    node: _Statement, count: int, comments: Sequence[cst.EmptyLine] | None = None
) -> _Statement:
    """Return *node* after *count* blank lines and *comments*; None: after its own comments."""
    lines = list(node.leading_lines if comments is None else comments)
    while lines and lines[0].comment is None:
        lines.pop(0)
    lines = [*[cst.EmptyLine(indent=False)] * count, *lines]
    return cast(_Statement, node.with_changes(leading_lines=lines))


def without(node: _Statement, is_unwanted: Callable[[cst.CSTNode], bool]) -> _Statement:
    """Return *node* without the unwanted statements and without blocks that become empty.

    A function, a class, and a block with an ``else`` stay, with ``pass``.
    """
    return cast(_Statement, node.visit(Remover(is_unwanted)))


class Remover(cst.CSTTransformer):
    """Removes unwanted statements; see :func:`without`."""

    def __init__(self, is_unwanted: Callable[[cst.CSTNode], bool]) -> None:
        super().__init__()
        self.is_unwanted = is_unwanted

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNode]:
        """Return the node, or the request to remove it."""
        node = super().on_leave(original_node, updated_node)
        is_statement = isinstance(original_node, (cst.BaseSmallStatement, cst.For))
        is_unwanted = is_statement and self.is_unwanted(original_node)
        return cst.RemoveFromParent() if is_unwanted or _is_empty(node) else node


def _is_empty(node: object) -> bool:
    is_block = isinstance(node, (cst.If, cst.For, cst.With, cst.Else)) and not node.body.body
    return is_block and getattr(node, "orelse", None) is None
