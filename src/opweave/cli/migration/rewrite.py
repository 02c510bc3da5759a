"""Methods as functions: what they read from the object becomes an argument."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from opweave.cli.migration.names import snake
from opweave.cli.migration.source import LayerClass
from opweave.cli.migration.syntax import Function, attribute_of_self


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
    rewritten.problems += _hidden(function, rewriter.replaced, set(arguments.values()))
    rewritten.problems = list(dict.fromkeys(rewritten.problems))
    return rewritten


def used_names(function: Function) -> set[str]:
    """Return the names that *function*, or a function in it, reads or gives to values."""
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return names | _bound(function)


def _hidden(function: Function, replaced: set[str], arguments: set[str]) -> list[str]:
    """Say which names would mean something else in a function of these arguments."""
    bound = _bound(function)
    globals_ = (used_names(function) - bound) & arguments
    return [f"its own {name} would hide an argument" for name in sorted(replaced & bound)] + [
        f"an argument would hide the {name} that it reads" for name in sorted(globals_)
    ]


def _bound(function: Function) -> set[str]:
    return {
        node.id if isinstance(node, ast.Name) else node.arg
        for node in ast.walk(function)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
    }


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self, layer: LayerClass, arguments: Mapping[str, str], rewritten: Rewritten
    ) -> None:
        self.layer, self.arguments, self.rewritten = layer, arguments, rewritten
        self.replaced: set[str] = set()  # names that stand for attributes now

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = attribute_of_self(node.func)
        if name and not self._is_function(name):
            self._problem(f"it calls self.{name}")
        self.generic_visit(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        name = attribute_of_self(node)
        if not name:
            self.generic_visit(node)
        elif isinstance(node.ctx, ast.Store):
            self._problem(f"it assigns self.{name}")
        elif name in self.arguments:
            self.replaced.add(self.arguments[name])
            return ast.Name(self.arguments[name], ast.Load())
        elif (kernel := self.layer.kernel(name)) is not None:
            return copy.deepcopy(kernel)
        elif self._is_function(name):
            helper = f"_{snake(self.layer.name)}_{name.lstrip('_')}"
            self.rewritten.helpers[helper] = self.layer.methods[name]
            return ast.Name(helper, ast.Load())
        elif f"it calls self.{name}" not in self.rewritten.problems:
            self._problem(f"it {'calls' if name in self.layer.methods else 'reads'} self.{name}")
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in ("self", "super"):
            self._problem(f"it uses {node.id} as a whole")
        return node

    def _is_function(self, name: str) -> bool:
        """Say whether an attribute is something that a function can call without the object."""
        method = self.layer.methods.get(name)
        return self.layer.kernel(name) is not None or (method is not None and _is_static(method))

    def _problem(self, text: str) -> None:
        self.rewritten.problems.append(text)


def _is_static(method: Function) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in method.decorator_list)
