"""Turns a method into a function: attributes of ``self`` become arguments."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from opweave_vllm.migrate.names import snake
from opweave_vllm.migrate.source import LayerClass
from opweave_vllm.migrate.syntax import Function, attribute_of_self, is_static


@dataclass
class Rewritten:
    """A method as a function without ``self``.

    Attributes:
        method: its name.
        replacements: the source text to write for attributes of ``self``, by attribute.
        helpers: the static methods that it calls, by the names of the functions they become.
        problems: why it cannot become a function.
    """

    method: str
    replacements: dict[str, str] = field(default_factory=dict)
    helpers: dict[str, Function] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def rewrite(function: Function, layer: LayerClass, arguments: Mapping[str, str]) -> Rewritten:
    """Return how *function* reads with *arguments* instead of the attributes of ``self``."""
    rewritten = Rewritten(function.name)
    reader = _BodyReader(layer, arguments, rewritten)
    for statement in function.body:
        reader.visit(statement)
    rewritten.problems += _hidden(function, reader.replaced, set(arguments.values()))
    rewritten.problems = list(dict.fromkeys(rewritten.problems))
    return rewritten


def used_names(function: Function) -> set[str]:
    """Return the names that *function*, or a function in it, reads or binds."""
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return names | _bound(function)


def _hidden(function: Function, replaced: set[str], arguments: set[str]) -> list[str]:
    """Return the names that would change their meaning in a function of these arguments."""
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


class _BodyReader(ast.NodeVisitor):
    def __init__(
        self, layer: LayerClass, arguments: Mapping[str, str], rewritten: Rewritten
    ) -> None:
        self.layer, self.arguments, self.rewritten = layer, arguments, rewritten
        self.replaced: set[str] = set()  # the arguments that are used

    def visit_Call(self, node: ast.Call) -> None:
        name = attribute_of_self(node.func)
        if name and not self._is_function(name):
            self._problem(f"it calls self.{name}")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = attribute_of_self(node)
        if not name:
            self.generic_visit(node)
        elif isinstance(node.ctx, ast.Store):
            self._problem(f"it assigns self.{name}")
        elif name in self.arguments:
            self.replaced.add(self.arguments[name])
            self.rewritten.replacements[name] = self.arguments[name]
        elif (kernel := self.layer.kernel(name)) is not None:
            self.rewritten.replacements[name] = ast.unparse(kernel)
        elif self._is_function(name):
            helper = f"_{snake(self.layer.name)}_{name.lstrip('_')}"
            self.rewritten.helpers[helper] = self.layer.methods[name]
            self.rewritten.replacements[name] = helper
        elif f"it calls self.{name}" not in self.rewritten.problems:
            self._problem(f"it {'calls' if name in self.layer.methods else 'reads'} self.{name}")

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in ("self", "super"):
            self._problem(f"it uses {node.id} as a whole")

    def _is_function(self, name: str) -> bool:
        """Return whether an attribute can be called without the object."""
        method = self.layer.methods.get(name)
        return self.layer.kernel(name) is not None or (method is not None and is_static(method))

    def _problem(self, text: str) -> None:
        self.rewritten.problems.append(text)
