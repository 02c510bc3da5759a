"""Queries over the syntax tree of a Jinja template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from opweave_engine.dependencies import require

_SAME_VALUE = {"d", "default", "list", "rejectattr", "reverse", "selectattr"}


@dataclass(frozen=True)
class Placed:
    """A node, and the nodes around it, the innermost first."""

    node: Any
    above: tuple[Any, ...]


class Syntax:
    """The syntax tree of one template."""

    def __init__(self, tree: Any) -> None:
        self.placed = list(self.below(tree))

    @staticmethod
    def below(root: Any) -> Iterator[Placed]:
        """Yield *root* and every node in it."""
        # Not recursive: an expression can nest more deeply than Python's stack.
        waiting = [Placed(root, ())]
        while waiting:
            placed = waiting.pop()
            yield placed
            above = (placed.node, *placed.above)
            waiting += [Placed(child, above) for child in placed.node.iter_child_nodes()]

    @cached_property
    def bindings(self) -> list[tuple[str, Any]]:
        """Every name and a value that it may have: of assignments, and of a macro's parameters."""
        nodes, found = require("jinja2.nodes"), []
        macros = {p.node.name: p.node for p in self.placed if isinstance(p.node, nodes.Macro)}
        for node in (placed.node for placed in self.placed):
            if isinstance(node, nodes.Assign):
                found.append((node.target, node.node))
            elif isinstance(node, nodes.With):
                found += zip(node.targets, node.values, strict=True)
            elif isinstance(node, nodes.Call) and (
                macro := macros.get(getattr(node.node, "name", None))
            ):
                by_name = {parameter.name: parameter for parameter in macro.args}
                found += zip(macro.args, node.args, strict=False)
                found += [(by_name.get(each.key), each.value) for each in node.kwargs]
        return [(target.name, value) for target, value in found if isinstance(target, nodes.Name)]


class Field:
    """Where a template reads one field of its messages, directly or through variables.

    Args:
        name: of the field.
        syntax: of the template.
    """

    def __init__(self, name: str, syntax: Syntax) -> None:
        self._name, self._nodes = name, require("jinja2.nodes")
        self._variables: set[str] = set()
        while True:
            found = {name for name, value in syntax.bindings if self.is_value(value)}
            if found <= self._variables:
                return
            self._variables |= found

    def is_read(self, node: Any) -> bool:
        """Return whether *node* reads the field: ``m.name``, ``m['name']``, or ``m.get('name')``.

        A variable that holds the field counts, too.
        """
        nodes = self._nodes
        if isinstance(node, nodes.Getattr):
            return bool(node.attr == self._name)
        if isinstance(node, nodes.Getitem):
            return self._is_name(node.arg)
        if isinstance(node, nodes.Call):
            is_get = isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
            return is_get and bool(node.args) and self._is_name(node.args[0])
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in self._variables

    def is_value(self, node: Any) -> bool:
        """Return whether the value of *node* is the field, or a list of items of it."""
        nodes = self._nodes
        if isinstance(node, nodes.Filter):
            return node.name in _SAME_VALUE and self.is_value(node.node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self.is_value(node.node)
        if isinstance(node, nodes.CondExpr):
            return any(self.is_value(each) for each in (node.expr1, node.expr2) if each)
        if isinstance(node, nodes.Or):
            return self.is_value(node.left) or self.is_value(node.right)
        return self.is_read(node)

    def _is_name(self, node: Any) -> bool:
        return is_constant(node) and bool(node.value == self._name)


def is_constant(node: Any) -> bool:
    """Return whether *node* is a constant."""
    return isinstance(node, require("jinja2.nodes").Const)
