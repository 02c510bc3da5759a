"""Names that a class binds: aliases of its methods, and annotated attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from opweave_vllm.migrate.syntax import (
    Function,
    annotation_text,
    attribute_of_self,
    dotted,
    is_docstring,
    own_parameters,
)


def assigned_names(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the names that a class assigns, with the value if it is a dotted name, else ""."""
    for each in node.body:
        if isinstance(each, ast.Assign):
            yield from ((dotted(target), dotted(each.value)) for target in each.targets)


def annotated_attributes(node: ast.ClassDef, init: Function | None) -> Iterator[tuple[str, str]]:
    """Yield the attributes that a class or its ``__init__`` annotates, with their types."""
    for each in [*node.body, *(ast.walk(init) if init else ())]:
        if isinstance(each, ast.AnnAssign):
            is_member = each in node.body and isinstance(each.target, ast.Name)
            if name := dotted(each.target) if is_member else attribute_of_self(each.target):
                yield name, annotation_text(each.annotation)


def delegates(methods: Mapping[str, Function]) -> Iterator[tuple[str, str]]:
    """Yield methods that only forward their arguments to a ``forward_...``, and its name."""
    for name, function in methods.items():
        if called := _delegate(function, methods):
            yield name, called


def _delegate(function: Function, methods: Mapping[str, Function]) -> str:
    """Return the ``forward_...`` to which a method only forwards its arguments, or ""."""
    statements = [each for each in function.body if not is_docstring(each)]
    if len(statements) != 1 or not isinstance(statements[0], ast.Return):
        return ""
    call = statements[0].value
    if not (isinstance(call, ast.Call) and attribute_of_self(call.func).startswith("forward_")):
        return ""
    called = attribute_of_self(call.func)
    target = methods.get(called, function)
    same = _given(call) == _taken(function) and _defaults(function) == _defaults(target)
    return called if same else ""


def _given(call: ast.Call) -> list[str]:
    """Return the arguments of a call, with ``k`` for ``k=k``."""
    positional = list(map(ast.unparse, call.args))
    return positional + [ast.unparse(each).removeprefix(f"{each.arg}=") for each in call.keywords]


def _taken(function: Function) -> list[str]:
    """Return the parameters of a method, as arguments that forward them."""
    arguments = function.args
    names = [each.arg for each, _ in own_parameters(function)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [each.arg for each in arguments.kwonlyargs]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _defaults(function: Function) -> list[str]:
    return list(map(ast.unparse, function.args.defaults))
