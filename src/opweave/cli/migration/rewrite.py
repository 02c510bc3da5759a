"""Methods as functions: what they read from the object becomes an argument."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from opweave.cli.migration.source import Function, LayerClass, is_kernel, snake


@dataclass
class Rewritten:
    """The body of a method without ``self``.

    Attributes:
        helpers: the static methods that it calls, by the names of the functions they become.
        problems: what stands in the way.
    """

    body: list[ast.stmt] = field(default_factory=list)
    helpers: dict[str, Function] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the source of the body."""
        return "\n".join(map(ast.unparse, self.body))


def rewrite(function: Function, layer: LayerClass, arguments: Mapping[str, str]) -> Rewritten:
    """Return *function* with *arguments* in the place of the attributes of self they stand for."""
    rewritten = Rewritten()
    rewriter = _Rewriter(layer, arguments, rewritten)
    rewritten.body = [rewriter.visit(copy.deepcopy(statement)) for statement in function.body]
    hidden = rewriter.replaced & bound_names(function)
    rewritten.problems += [f"its own {name} would hide an argument" for name in sorted(hidden)]
    rewritten.problems = list(dict.fromkeys(rewritten.problems))
    return rewritten


def bound_names(function: Function) -> set[str]:
    """Return the names that *function*, or a function in it, gives to values."""
    return {
        node.id if isinstance(node, ast.Name) else node.arg
        for node in ast.walk(function)
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and _is_stored(node))
    }


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self, layer: LayerClass, arguments: Mapping[str, str], rewritten: Rewritten
    ) -> None:
        self.layer, self.arguments, self.rewritten = layer, arguments, rewritten
        self.replaced: set[str] = set()  # names that stand for attributes now

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            self.generic_visit(node)
            return node
        name, method = node.attr, self.layer.methods.get(node.attr)
        value = self.layer.attributes.get(name)
        if isinstance(node.ctx, ast.Store):
            self._problem(f"it assigns self.{name}")
        elif name in self.arguments:
            self.replaced.add(self.arguments[name])
            return ast.Name(self.arguments[name], ast.Load())
        elif value is not None and is_kernel(value):
            return copy.deepcopy(value)
        elif method is not None and _is_static(method):
            helper = f"_{snake(self.layer.name)}_{name.lstrip('_')}"
            self.rewritten.helpers[helper] = method
            return ast.Name(helper, ast.Load())
        else:
            what = "calls" if method is not None else "reads"
            self._problem(f"it {what} self.{name}")
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in ("self", "super"):
            self._problem(f"it uses {node.id} as a whole")
        return node

    def _problem(self, text: str) -> None:
        self.rewritten.problems.append(text)


def _is_stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _is_static(method: Function) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in method.decorator_list)
