"""Trace implementations into aten graphs; operators that write become functional."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, count
from typing import Any, cast

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from opweave.compile import compat
from opweave.compile.aliasing import Relocation, are_movable, expressions, same_layout
from opweave.compile.graph import GraphInfo, IrCall, computed_fake, fake_of, tensors_of
from opweave.compile.options import logger
from opweave.ir import IrOpImpl
from opweave.ir.dispatch import OpMode
from opweave.ir.errors import described
from opweave.ir.op import OpDefinition
from opweave.ir.schema import Schema
from opweave.ir.torch_ops import entered

# Prepare operators that write to an argument for Inductor, which expects functional graphs.
#
# Pointwise in-place operators and ``out=`` variants are traced as the functional variant and a
# copy, which Inductor fuses. Other operators, such as ``aten.index_add_``, remain. Inductor
# treats the result of some of these as new memory and may reuse the memory of the argument while
# the result is still needed, so users of the result are changed to read the argument.


_Op = compat.OpOverload


class Functional(compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces operators that write by their functional variants and copies of the results."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if function is compat.FOREACH_COPY:
            for target, source in zip(*args[:2], strict=True):
                target.copy_(source)
            return None
        variant = _functional(function) if isinstance(function, _Op) else None
        if variant is None:
            return function(*args, **keywords)
        functional, names = variant
        outs = _as_sequence([keywords.pop(name) for name in names] or args[0])
        results = functional(*args, **keywords)
        if not all(map(_fits, _as_sequence(results), outs)):
            return function(*args, **(kwargs or {}))  # resizes the outputs, or raises
        for out, result in zip(outs, _as_sequence(results), strict=True):
            out.copy_(result)
        if not function._schema.returns:
            return None
        return tuple(outs) if isinstance(results, tuple) else outs[0]


def _as_sequence(values: Any) -> Sequence[Tensor]:
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
    parameters = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    for name in packet.overloads():
        other = getattr(packet, name)
        same = [(a.name, str(a.type)) for a in other._schema.arguments] == parameters
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
    before, after = fake_of(argument), fake_of(result)
    if not same_layout(before, after) or compat.storage_key(before) != compat.storage_key(after):
        raise ValueError(f"{result.target} changes the layout of a tensor in place")
    result.replace_all_uses_with(argument)


def written_results(node: Node, target: _Op) -> dict[int, Node]:
    """Return the written argument that each result of *node* aliases, by position."""
    arguments, returns = target._schema.arguments, target._schema.returns
    values = dict(zip((argument.name for argument in arguments), node.args, strict=False))
    values |= node.kwargs
    return {
        position: value
        for position, result in enumerate(returns)
        for argument in arguments
        if argument.is_write and _alias(argument) & _alias(result)
        if isinstance(value := values.get(argument.name), Node)
    }


def _alias(value: torch.Argument) -> set[str]:
    """Return the alias sets of an argument or a result in a schema."""
    return set(value.alias_info.before_set) if value.alias_info else set()


# Trace implementations into aten graphs, once per signature.


Function = Callable[..., Any]
Signature = tuple[Any, ...]
_SYMBOLIC = (SymInt, SymFloat, SymBool)


@dataclass(frozen=True)
class AtenTrace:
    """The graph of one implementation for one signature.

    Attributes:
        module: the graph, with a placeholder for each tensor and symbolic number among the values.
        failure: why tracing failed, or an empty string.
    """

    module: GraphModule | None
    failure: str = ""

    @cached_property
    def info(self) -> GraphInfo:
        """The graph, which does not change."""
        if self.module is None:
            raise ValueError(self.failure)
        return GraphInfo(self.module.graph)

    @cached_property
    def outputs(self) -> list[Node]:
        """The nodes whose values the implementation returns."""
        return flat_nodes(self.info.nodes[-1].args)

    @property
    def mutates(self) -> bool:
        """Whether an operator in the graph writes to an argument, even a buffer of the graph."""
        return bool(self.info.writes)

    @cached_property
    def is_movable(self) -> bool:
        """Whether copies of the graph can reuse its fake values in other storages."""
        values = [node.meta["val"] for node in self.info.nodes if "val" in node.meta]
        return are_movable(values, list(map(fake_of, self.info.inputs)))


class Tracer:
    """Traces implementations, and caches the traces by signature."""

    def __init__(self) -> None:
        self.traces: dict[Signature, AtenTrace] = {}

    def trace(
        self,
        impl: IrOpImpl,
        values: Sequence[Any],
        function: Function | None = None,
        *,
        autocast: str = "",
    ) -> AtenTrace:
        """Return the graph of *impl* for *values* (fake tensors and numbers, one per parameter).

        With *function*, trace that form of the implementation instead of ``impl_fn``. Under
        *autocast*, the graph contains the casts and the native implementations of the ops that
        *impl* calls, because their casts depend on the caller's autocast state.
        """
        function = function or impl.impl_fn
        key = (function, autocast, tuple(map(signature, values)))
        aten_trace = self.traces.get(key)
        if aten_trace is None:
            if autocast:
                function = _under_autocast(function, autocast)
            aten_trace = self.traces[key] = _trace(function, impl.op.schema, values)
            outcome = aten_trace.failure or f"{len(aten_trace.info.nodes)} nodes"
            logger.debug("traced %s of %s: %s", impl.provider, impl.op.name, outcome)
        return aten_trace


def signature(value: Any) -> Signature:
    """Return the part of a value that a trace depends on; dynamic sizes as their expressions."""
    if isinstance(value, Tensor):
        facts = value.dtype, value.device, value.ndim, value.is_conj(), value.is_neg()
        return (*facts, expressions(value))
    if isinstance(value, _SYMBOLIC):
        return (type(value), value.node.expr)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(signature, value))
    if isinstance(value, float):
        return (float, repr(value))  # 0.0 equals -0.0, and NaN not itself
    return (type(value), value)


def variables(values: Sequence[Any]) -> list[Any]:
    """Return the tensors and symbolic numbers in *values*, with lists flattened."""
    return [value for value in _flat(values) if isinstance(value, (Tensor, *_SYMBOLIC))]


def flat_nodes(values: Sequence[Any]) -> list[Node]:
    """Return the nodes in *values*, with lists flattened."""
    return [value for value in _flat(values) if isinstance(value, Node)]


def arguments(call: IrCall) -> list[Node]:
    """Return the nodes that compute the :func:`variables` of a call."""
    pairs = zip(_flat(call.values), _flat(call.fakes), strict=True)
    return [node for node, fake in pairs if isinstance(fake, (Tensor, *_SYMBOLIC))]


def inline(graph: Graph, trace: AtenTrace, before: Node, operands: Sequence[Node]) -> list[Node]:
    """Copy a trace into *graph* before the node *before*, and return its output nodes.

    The new nodes get fake values in new storages: alias analysis compares storages, so two inlined
    copies of a trace must not appear to share memory.
    """
    mode = compat.fake_mode_of([fake_of(node) for node in operands]) or compat.FakeTensorMode()
    copies: dict[Node, Any] = dict(zip(trace.info.inputs, operands, strict=True))
    outputs: Any = ()
    with graph.inserting_before(before):
        for node in trace.info.nodes:
            if node.op == "output":
                outputs = torch.fx.map_arg(node.args[0], copies.__getitem__)
            elif node.op == "get_attr":
                copies[node] = _constant(graph, trace, node, before)
            elif node.op != "placeholder":
                copies[node] = _copy(graph, node, copies, before)
    (_move_fakes if trace.is_movable else _compute_fakes)(mode, copies)
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _copy(graph: Graph, node: Node, copies: dict[Node, Any], origin: Node) -> Node:
    new = graph.node_copy(node, copies.__getitem__)
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "seq_nr"):
        if key in origin.meta:
            new.meta[key] = origin.meta[key]
    new.meta.pop("tensor_meta", None)
    return new


def _move_fakes(mode: compat.FakeTensorMode, copies: dict[Node, Node]) -> None:
    """Move the fake values of the originals into the storages of the copies' inputs."""
    relocation = Relocation(mode)
    with torch.no_grad(), compat.no_modes():
        for node, new in copies.items():
            if node.op in ("placeholder", "get_attr"):
                for tensor, there in zip(tensors_of(node), tensors_of(new), strict=True):
                    relocation.put(tensor, there)
            elif "val" in node.meta:
                relocation.put_in_new_memory(node.meta["val"])
                new.meta["val"] = relocation.move(node.meta["val"])


def _compute_fakes(mode: compat.FakeTensorMode, copies: dict[Node, Node]) -> None:
    """Compute the fake values of the copies by running their operators."""
    for node, new in copies.items():
        is_higher_order = isinstance(node.target, compat.HigherOrderOperator)
        if node.op not in ("placeholder", "get_attr") and not is_higher_order:
            new.meta["val"] = computed_fake(new, mode)


def _constant(graph: Graph, trace: AtenTrace, node: Node, origin: Node) -> Node:
    """Copy a tensor or subgraph that the implementation closes over into *graph*."""
    owner, value = graph.owning_module, getattr(trace.module, str(node.target))
    if owner is None:
        raise ValueError(f"the graph of {origin.name} has no module to keep {node.target} in")
    base = f"_opweave_{node.target}"
    names = chain([base], (f"{base}_{number}" for number in count(1)))
    name = next(n for n in names if getattr(owner, n, value) is value)
    if isinstance(value, Tensor):
        owner.register_buffer(name, value, persistent=False)
    else:
        setattr(owner, name, value)
    new = graph.get_attr(name)
    new.meta.update(node.meta)
    return new


def _flat(values: Sequence[Any]) -> list[Any]:
    return [i for v in values for i in (v if isinstance(v, (list, tuple)) else (v,))]


def _call_native(op: OpDefinition, *args: Any, **kwargs: Any) -> Any:
    with nullcontext() if op.autocast else compat.no_autocast():
        return op.native(*args, **kwargs)


def _under_autocast(function: Function, autocast: str) -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        with entered(autocast), OpMode(_call_native):  # the autocast state is still known here
            return function(*args, **kwargs)

    return run


def _trace(function: Function, schema: Schema, values: Sequence[Any]) -> AtenTrace:
    def flat(*leaves: Any) -> Any:
        replaced = iter(leaves)

        def put(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(put(item) for item in value)
            return next(replaced) if isinstance(value, (Tensor, *_SYMBOLIC)) else value

        args, kwargs = schema.split([put(value) for value in values])
        with Functional():  # type: ignore[no-untyped-call]
            return function(*args, **kwargs)

    try:
        module = compat.trace(flat, list(map(_in_new_memory, variables(values))))
        prepare_writes(module.graph)
        module.graph.eliminate_dead_code()  # results that decompositions compute for autograd
        return AtenTrace(module)
    except Exception as error:
        # Tracing runs third-party code, which may raise anything: the op stays an opaque call.
        return AtenTrace(None, described(error)[:300])


def _in_new_memory(value: Any) -> Any:
    """Return a copy of a fake tensor: the trace must also hold for arguments that share no memory.

    Other values are returned as they are.
    """
    is_plain = isinstance(value, Tensor) and compat.is_plain_fake(value)
    return compat.fresh_fake(value) if is_plain else value
