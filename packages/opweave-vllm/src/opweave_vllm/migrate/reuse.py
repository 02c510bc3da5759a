"""Detects methods that change or return their arguments, which ops may not."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from opweave_vllm.migrate.syntax import Function, dotted, own_nodes

_FUNCTIONS = frozenset({"torch", "F", "nn.functional", "torch.nn.functional"})
_MAY_SHARE = {  # methods whose result may share the tensor's memory
    *("T", "chunk", "contiguous", "data", "detach", "expand", "expand_as", "flatten", "float"),
    *("half", "mT", "narrow", "permute", "reshape", "select", "split", "squeeze", "t", "to"),
    *("transpose", "type", "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view"),
    "view_as",
}


def changed_or_returned(function: Function) -> str | None:
    """Return an argument that *function* changes in place or returns, or None.

    Possible views of an argument count as the argument. Names that are assigned twice are ignored:
    their value is unknown.
    """
    assigned = Counter(name for node in ast.walk(function) for name, _ in _assigned(node))
    arguments = {arg.arg for arg in function.args.args[1:]} - set(assigned)
    values = {
        name: value
        for node in own_nodes(function)
        for name, value in _assigned(node)
        if assigned[name] == 1 and value is not None
    }
    given_back = (value for node in own_nodes(function) for value in _given_back(node))
    owners = (name for value in given_back for name in _owners(value, values))
    return next((name for name in owners if name in arguments), None)


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that a statement assigns, and the value that each is a part of."""
    if isinstance(node, (ast.Assign, ast.For)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = node.value if isinstance(node, ast.Assign) else None
        for target in targets:
            items = target.elts if isinstance(target, ast.Tuple) else [target]
            whole = None if isinstance(value, ast.Tuple) and len(items) > 1 else value
            yield from ((name, whole) for item in items for name in _names(item))
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        yield from ((name, node.value) for name in _names(node.target))


def _given_back(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a statement writes to or returns."""
    if isinstance(node, ast.Return) and node.value is not None:
        yield node.value
    elif isinstance(node, ast.AugAssign):
        yield _whole(node.target)
    elif isinstance(node, ast.Assign):
        yield from (_whole(each) for each in node.targets if isinstance(each, ast.Subscript))
    elif isinstance(node, ast.Call):
        options = {each.arg: each.value for each in node.keywords}
        if "out" in options:
            yield options["out"]
        if "inplace" in options and ast.unparse(options["inplace"]) != "False":
            yield from node.args[:1]
        if isinstance(node.func, ast.Attribute) and _is_in_place(node.func.attr):
            yield _holder(node)


def _is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")


def _holder(call: ast.Call) -> ast.expr:
    """Return ``x`` for ``x.t()`` and ``torch.t(x)``."""
    assert isinstance(call.func, ast.Attribute)
    function = dotted(call.func.value) in _FUNCTIONS and call.args
    return call.args[0] if function else call.func.value


def _whole(target: ast.expr) -> ast.expr:
    """Return ``x`` for ``x[0][1]``."""
    return _whole(target.value) if isinstance(target, ast.Subscript) else target


def _owners(value: ast.expr, values: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the names whose memory *value* may share, as in ``(a, b.view(-1))`` and ``a[0]``."""
    if isinstance(value, ast.Name):
        yield value.id
        if value.id in values:
            rest = {name: each for name, each in values.items() if name != value.id}
            yield from _owners(values[value.id], rest)
    for part in _sharing(value):
        yield from _owners(part, values)


def _sharing(value: ast.expr) -> list[ast.expr]:
    """Return the parts of an expression whose memory its result may share."""
    match value:
        case ast.Tuple():
            return value.elts
        case ast.IfExp():
            return [value.body, value.orelse]
        case ast.Subscript() if _is_view(value.slice):
            return [value.value]
        case ast.Attribute(attr=name) if name in _MAY_SHARE:
            return [value.value]
        case ast.Call(func=ast.Attribute(attr=name)) if name in _MAY_SHARE or _is_in_place(name):
            return [_holder(value)]
    return []


def _is_view(index: ast.expr) -> bool:
    """Return whether indexing a tensor gives a view: tensors as indices copy."""
    if isinstance(index, ast.Tuple):
        return all(map(_is_view, index.elts))
    return isinstance(index, (ast.Slice, ast.Constant, ast.UnaryOp))


def _names(value: ast.expr) -> Iterator[str]:
    """Yield the names in a target."""
    if isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, (ast.Tuple, ast.List)):
        for item in value.elts:
            yield from _names(item)
