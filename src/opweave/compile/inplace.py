"""Operators that write to an argument, in the traces of implementations.

``aten.tanh_(x)`` returns *x*. Inductor calls some of these operators as they are, and takes their
result for new memory: it would give the memory of *x* to another tensor while the result is needed.
So users of the result read *x* instead. ``out=`` variants, which Inductor does not know, are traced
as the functional variant and a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from opweave.compile import compat
from opweave.compile.nodes import fake_of
from opweave.compile.relocation import same_layout

_Op = torch._ops.OpOverload


class WithoutOut(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls functional variants in place of ``out=`` variants, and copies their results."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        found = _without_out(function) if isinstance(function, _Op) else None
        if found is None:
            return function(*args, **given)
        functional, names = found
        outs = [given.pop(name) for name in names]
        results = functional(*args, **given)
        flat = results if isinstance(results, tuple) else (results,)
        if any(out.shape != result.shape for out, result in zip(outs, flat, strict=True)):
            return function(*args, **(kwargs or {}))  # resizes them
        for out, result in zip(outs, flat, strict=True):
            out.copy_(result)
        return tuple(outs) if isinstance(results, tuple) else outs[0]


@cache
def _without_out(
    target: _Op,
) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """Return the functional variant of an ``out=`` variant, and the names of what that writes."""
    arguments = target._schema.arguments
    names = tuple(argument.name for argument in arguments if argument.is_out)
    if not names or len(names) != len(target._schema.returns):
        return None
    wanted = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        same = [(a.name, str(a.type)) for a in other._schema.arguments] == wanted
        if same and not other._schema.is_mutable:
            return other, names
    return None


def read_written_arguments(graph: Graph) -> None:
    """Replace each result that is an argument, written in place, by that argument.

    Raises:
        ValueError: an operator changes the sizes or strides of its argument, as ``t_`` does.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not compat.is_mutable(node.target):
            continue
        target = cast("_Op", node.target)
        written = written_results(node, target)
        if len(target._schema.returns) == 1:
            _replace(node, written.get(0))
        else:
            for user in [user for user in node.users if user.target is operator.getitem]:
                _replace(user, written.get(cast("int", user.args[1])))


def _replace(result: Node, argument: Node | None) -> None:
    if argument is None:
        return
    if not _same_view(fake_of(argument), fake_of(result)):
        raise ValueError(f"{result.target} changes the layout of a tensor in place")
    result.replace_all_uses_with(argument)


def written_results(node: Node, target: _Op) -> dict[int, Node]:
    """Return the argument that each result of *node* is, by position."""
    arguments, returns = target._schema.arguments, target._schema.returns
    given = dict(zip((argument.name for argument in arguments), node.args, strict=False))
    given |= node.kwargs
    return {
        position: value
        for position, result in enumerate(returns)
        for argument in arguments
        if argument.is_write and _alias(argument) & _alias(result)
        if isinstance(value := given.get(argument.name), Node)
    }


def _alias(value: torch.Argument) -> set[str]:
    """Return the alias sets that a schema notes for an argument or a result."""
    return set(value.alias_info.before_set) if value.alias_info else set()


def _same_view(a: object, b: object) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and compat.storage_key(a) == compat.storage_key(b)
        and same_layout(a, b)
    )
