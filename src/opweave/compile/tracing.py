"""Implementations as aten graphs, traced once for each signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from opweave.compile import compat
from opweave.compile.log import logger
from opweave.compile.nodes import IrCall, fake_of
from opweave.ir import IrOpImpl
from opweave.ir.schema import Schema

Function = Callable[..., Any]
Signature = tuple[Any, ...]
_SYMBOLIC = (SymInt, SymFloat, SymBool)


@dataclass(frozen=True)
class Trace:
    """The graph of one implementation for one signature.

    Attributes:
        module: the graph, with a placeholder for each tensor and symbolic number among the values.
        failure: why there is no graph, else empty.
    """

    module: GraphModule | None
    failure: str = ""

    @property
    def graph(self) -> Graph:
        if self.module is None:
            raise ValueError(self.failure)
        return self.module.graph

    @property
    def outputs(self) -> list[Node]:
        """The nodes whose values the implementation returns."""
        returned = next(node for node in self.graph.nodes if node.op == "output").args[0]
        return flat_nodes([returned])

    @cached_property
    def mutates(self) -> bool:
        """Whether a kernel in the graph writes to an argument, be it a buffer made in the graph."""
        return any(compat.is_mutable(node.target) for node in self.graph.nodes)


class Tracer:
    """Traces implementations, and keeps the traces for later calls with the same signature."""

    def __init__(self) -> None:
        self.traces: dict[Signature, Trace] = {}

    def trace(
        self, impl: IrOpImpl, values: Sequence[Any], function: Function | None = None
    ) -> Trace:
        """Return the graph of *impl* for *values* (fake tensors and numbers, one per parameter).

        With *function*, that of another form of the implementation.
        """
        function = function or impl.impl_fn
        key = (function, tuple(map(signature, values)))
        found = self.traces.get(key)
        if found is None:
            found = self.traces[key] = _trace(function, impl.op.schema, values)
            outcome = found.failure or f"{len(found.graph.nodes)} nodes"
            logger.debug("traced %s of %s: %s", impl.provider, impl.op.name, outcome)
        return found


def signature(value: Any) -> Signature:
    """Return what of a value a trace depends on; sizes that vary count as their expressions."""
    if isinstance(value, Tensor):
        sizes = tuple(map(_size, (*value.shape, *value.stride())))
        return (value.dtype, value.device, value.ndim, sizes, value.is_conj(), value.is_neg())
    if isinstance(value, _SYMBOLIC):
        return (type(value), value.node.expr)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(signature, value))
    return (type(value), value)


def variables(values: Sequence[Any]) -> list[Any]:
    """Return the tensors and symbolic numbers among *values*, lists flattened."""
    return [value for value in _flat(values) if isinstance(value, (Tensor, *_SYMBOLIC))]


def flat_nodes(values: Sequence[Any]) -> list[Node]:
    """Return the nodes among *values*, lists flattened."""
    return [value for value in _flat(values) if isinstance(value, Node)]


def arguments(call: IrCall) -> list[Node]:
    """Return the nodes that compute the :func:`variables` of a call."""
    pairs = zip(_flat(call.values), _flat(call.fakes), strict=True)
    return [node for node, fake in pairs if isinstance(fake, (Tensor, *_SYMBOLIC))]


def inline(graph: Graph, trace: Trace, before: Node, given: Sequence[Node]) -> list[Node]:
    """Copy a trace into *graph*, in front of *before*, and return its outputs.

    The new nodes get fake values of their own, computed from those of *given*: storages tell
    views from copies, and two inlined copies of one trace must not look as if they shared any.
    """
    copies: dict[Node, Any] = {}
    waiting = iter(given)
    mode = compat.fake_mode_of([fake_of(node) for node in given]) or compat.FakeTensorMode()
    outputs: Any = ()
    with graph.inserting_before(before), torch.no_grad(), mode:
        for node in trace.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(waiting)
            elif node.op == "output":
                outputs = torch.fx.map_arg(node.args[0], copies.__getitem__)
            else:
                copies[node] = _copy(graph, trace, node, copies, before)
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _copy(graph: Graph, trace: Trace, node: Node, copies: dict[Node, Any], origin: Node) -> Node:
    if node.op == "get_attr":
        return _constant(graph, trace, node, origin)
    new = graph.node_copy(node, copies.__getitem__)
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "seq_nr"):
        if key in origin.meta:
            new.meta[key] = origin.meta[key]
    args, kwargs = torch.fx.map_arg((new.args, new.kwargs), fake_of)
    if isinstance(node.target, torch._ops.OpOverload) or not isinstance(
        node.target, torch._ops.HigherOrderOperator
    ):
        new.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    new.meta.pop("tensor_meta", None)
    return new


def _constant(graph: Graph, trace: Trace, node: Node, origin: Node) -> Node:
    """Bring a tensor or subgraph that the implementation closes over along."""
    owner, value = graph.owning_module, getattr(trace.module, str(node.target))
    if owner is None:
        raise ValueError(f"the graph of {origin.name} has no module to keep {node.target} in")
    name = next(n for n in _names(f"_opweave_{node.target}") if getattr(owner, n, value) is value)
    setattr(owner, name, value)
    new = graph.get_attr(name)
    new.meta.update(node.meta)
    return new


def _names(base: str) -> Any:
    yield base
    number = 0
    while True:
        number += 1
        yield f"{base}_{number}"


def _flat(values: Sequence[Any]) -> list[Any]:
    return [i for v in values for i in (v if isinstance(v, (list, tuple)) else (v,))]


def _trace(function: Function, schema: Schema, values: Sequence[Any]) -> Trace:
    def flat(*given: Any) -> Any:
        replaced = iter(given)

        def put(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(put(item) for item in value)
            return next(replaced) if isinstance(value, (Tensor, *_SYMBOLIC)) else value

        args, kwargs = schema.split([put(value) for value in values])
        return function(*args, **kwargs)

    try:
        return Trace(compat.trace(flat, variables(values)))
    except Exception as error:
        # Whatever a kernel's Python does that tracing cannot follow: it stays one opaque call.
        return Trace(None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _size(size: Any) -> Any:
    return size.node.expr if isinstance(size, SymInt) else size
