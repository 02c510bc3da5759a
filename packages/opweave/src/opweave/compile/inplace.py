"""Prepare operators that write to an argument for Inductor, which expects functional graphs.

Pointwise in-place operators and ``out=`` variants are traced as the functional variant and a copy,
which Inductor fuses. Other operators, such as ``aten.index_add_``, remain. Inductor treats the
result of some of these as new memory and may reuse the memory of the argument while the result is
still needed, so users of the result are changed to read the argument.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from opweave.compile import compat
from opweave.compile.nodes import fake_of
from opweave.compile.relocation import same_layout

_Op = compat.OpOverload


class Functional(compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces operators that write by their functional variants and copies of the results."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if function is compat.FOREACH_COPY:
            for target, source in zip(*args[:2], strict=True):
                target.copy_(source)
            return None
        found = _functional(function) if isinstance(function, _Op) else None
        if found is None:
            return function(*args, **given)
        functional, names = found
        outs = _flat([given.pop(name) for name in names] or args[0])
        results = functional(*args, **given)
        if not all(map(_fits, _flat(results), outs)):
            return function(*args, **(kwargs or {}))  # resizes the outputs, or raises
        for out, result in zip(outs, _flat(results), strict=True):
            out.copy_(result)
        if not function._schema.returns:
            return None
        return tuple(outs) if isinstance(results, tuple) else outs[0]


def _flat(values: Any) -> Sequence[Tensor]:
    return values if isinstance(values, (list, tuple)) else (values,)


def _fits(result: Tensor, out: Tensor) -> bool:
    return result.shape == out.shape and torch.can_cast(result.dtype, out.dtype)


@cache
def _functional(target: _Op) -> tuple[_Op, tuple[str, ...]] | None:
    """Return the functional variant of an operator that writes, and its ``out=`` parameters.

    The parameter names are empty for in-place operators, which write to their first argument.
    """
    arguments = target._schema.arguments
    names = tuple(argument.name for argument in arguments if argument.is_out)
    packet: Any = target.overloadpacket
    if not names:
        packet = _out_of_place(target)
        if packet is None:
            return None
    elif len(names) != len(target._schema.returns):
        return None
    wanted = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    for name in packet.overloads():
        other = getattr(packet, name)
        same = [(a.name, str(a.type)) for a in other._schema.arguments] == wanted
        if same and not other._schema.is_mutable:
            return other, names
    return None


def _out_of_place(target: _Op) -> Any:
    """Return ``aten.tanh`` for ``aten.tanh_``, or None if *target* uses the random generator."""
    name = target._schema.name.removeprefix("aten::")
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if name.startswith("__i"):  # __iand__
        return getattr(torch.ops.aten, f"__{name[3:]}", None)
    is_elementwise = torch.Tag.pointwise in target.tags or name in ("fill_", "zero_")
    if not name.endswith("_") or not (is_elementwise or name.startswith("_foreach_")):
        return None
    return getattr(torch.ops.aten, name.removesuffix("_"), None)


def prepare_writes(graph: Graph) -> None:
    """Make operators that write to an argument safe for Inductor.

    Uses of a result that aliases a written argument are replaced with the argument.

    Raises:
        ValueError: an operator changes the sizes or strides of its argument, as ``t_`` does.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not compat.is_mutable(node.target):
            continue
        target = cast("_Op", node.target)
        compat.let_inductor_call(target)
        written = written_results(node, target)
        if len(target._schema.returns) == 1:
            _replace(node, written.get(0))
        else:
            for user in [user for user in node.users if user.target is operator.getitem]:
                _replace(user, written.get(cast("int", user.args[1])))


def copy_through_views(graph: Graph) -> None:
    """Make every ``copy_`` write through a view of its target.

    Inductor implements a copy to a whole tensor by making the target an alias of the source. Then
    writes to one change the other, and earlier writes to the target, through views or an index, go
    to the wrong memory. A copy to a view is always a write.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target = cast("Node", node.args[0])
        if target.op == "placeholder":
            continue  # Inductor never makes inputs an alias
        node.replace_all_uses_with(target)
        with graph.inserting_before(node):
            view = graph.call_function(torch.ops.aten.unsqueeze.default, (target, 0))
        view.meta["val"] = torch.unsqueeze(fake_of(target), 0)
        node.update_arg(0, view)


def _replace(result: Node, argument: Node | None) -> None:
    if argument is None:
        return
    if not _same_view(fake_of(argument), fake_of(result)):
        raise ValueError(f"{result.target} changes the layout of a tensor in place")
    result.replace_all_uses_with(argument)


def written_results(node: Node, target: _Op) -> dict[int, Node]:
    """Return the written argument that each result of *node* aliases, by position."""
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
    """Return the alias sets of an argument or a result in a schema."""
    return set(value.alias_info.before_set) if value.alias_info else set()


def _same_view(a: object, b: object) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and compat.storage_key(a) == compat.storage_key(b)
        and same_layout(a, b)
    )
