"""Lowering: inline functional implementations, and let in-place kernels reuse memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as with_changes
from typing import cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from opweave.compile import compat, graph
from opweave.compile.options import CompileError, logger
from opweave.compile.plan import Context
from opweave.compile.report import Reuse
from opweave.compile.tracing import AtenTrace, arguments, flat_nodes, inline, written_results
from opweave.ir import Selection
from opweave.ir.donation import overlaps_itself
from opweave.torch_compat import decided

# Lowering, first part: inline functional implementations.
#
# This runs before Inductor's own passes, which then see plain aten, as if the user had called
# the implementation instead of the op.


_KEPT = "opweave_kept"
MAX_DEPTH = 16  # of implementations that call other ops; more than three are unusual


def lower_functional(info: graph.GraphInfo, context: Context) -> None:
    """Inline every functional implementation, including those of ops that it calls.

    Raises:
        CompileError: implementations call each other recursively, or return invalid outputs.
    """
    _lower_calls(info, context, _lower_functional)


def _lower_calls(
    info: graph.GraphInfo,
    context: Context,
    lower: Callable[[graph.IrCall, graph.GraphInfo, Context], bool],
) -> graph.GraphInfo:
    """Lower the calls of ops, then those in the inlined implementations; return the final state.

    Args:
        info: the graph.
        context: the context of the compilation.
        lower: lowers a call; returns False to leave it as it is.

    Raises:
        CompileError: implementations call each other recursively.
    """
    left = {call.node for call in info.calls.values() if is_kept(call)}
    for _ in range(MAX_DEPTH):
        calls = [call for node, call in info.calls.items() if node not in left]
        if not calls:
            return info
        for node in [call.node for call in calls]:
            call = graph.ir_call(node)  # again, because its arguments may have been replaced
            if call and not lower(call, info, context):
                left.add(node)
        info = info.current()  # the calls in inlined implementations come next
    chosen = {call.op.name: context.plan.select(call).provider for call in calls}
    named = ", ".join(f"{provider!r} of {op}" for op, provider in chosen.items())
    raise CompileError(
        f"implementations call each other, {MAX_DEPTH} deep or more: {named}. One of them calls "
        "the op that it implements; call the op's .native, or another op."
    )


def _lower_functional(call: graph.IrCall, info: graph.GraphInfo, context: Context) -> bool:
    selection = context.plan.select(call)
    if selection.impl.inplace:
        return False
    trace = context.tracer.trace(selection.impl, call.fakes, autocast=call.autocast)
    if trace.failure or trace.mutates:
        return False
    check_outputs(call, selection, trace)
    context.describe(call, selection, "lower functional")
    graph.replace(call, inline(info.graph, trace, call.node, arguments(call)))
    return True


def is_kept(call: graph.IrCall) -> bool:
    """Return whether *call* was left as a call of the torch op that runs the selected kernel."""
    return _KEPT in call.node.meta


def check_outputs(call: graph.IrCall, selection: Selection, trace: AtenTrace) -> None:
    """Check the number, dtypes and shapes of the outputs of an implementation.

    Raises:
        CompileError: they differ from the outputs that the graph expects.
    """
    expected, returned = graph.tensors_of(call.node), list(map(graph.fake_of, trace.outputs))
    if len(expected) == len(returned) and all(map(_alike, expected, returned)):
        return
    promise, result = (", ".join(map(_described, outputs)) for outputs in (expected, returned))
    impl = f"{call.op.name}: the implementation {selection.provider!r} ({selection.impl.place})"
    if not call.autocast:
        raise CompileError(
            f"{impl} returns ({result}), but the op's definition, or its fake implementation, "
            f"says ({promise}). Fix it, or remove the provider from the priority."
            f"{selection.impl.way_out}"
        )
    raise CompileError(
        f"{impl} returns ({result}) under torch.autocast ({call.autocast}), but its fake "
        f"implementation says ({promise}). Call it under torch.autocast(..., enabled=False), or "
        f"check torch.is_autocast_enabled() in the fake implementation.{selection.impl.way_out}"
    )


def _alike(a: Tensor, b: object) -> bool:
    """Return whether two outputs may have the same shape and dtype.

    The trace may come from another call with other symbols, so dynamic sizes are not compared.
    """
    return (
        isinstance(b, Tensor)
        and a.dtype == b.dtype
        and a.ndim == b.ndim
        and not any(
            (type(m) is int or type(n) is int) and statically_known_true(m != n)
            for m, n in zip(a.shape, b.shape, strict=True)
        )
    )


def _described(output: object) -> str:
    if not isinstance(output, Tensor):
        return type(output).__name__
    return f"{output.dtype}[{', '.join(map(str, output.shape))}]"


# Remove writes to memory that is not read afterwards, as for unused outputs of in-place kernels.
#
# Dead code elimination keeps nodes that write to memory, but Inductor fails on a write to an
# unused buffer.


def remove_dead_writes(info: graph.GraphInfo) -> None:
    """Erase aten operators whose only effect is to write to intermediate memory not read later.

    Operators of other namespaces stay: they may have side effects that are not in the schema.
    """
    for node in reversed(info.writes):  # a write may be the only reader of an earlier one
        if _is_dead(node, info):
            info.graph.erase_node(node)
            info.forget([node])


def _is_dead(node: Node, info: graph.GraphInfo) -> bool:
    """Return whether *node* only writes to arguments that it returns, and that nothing reads."""
    target = cast("compat.OpOverload", node.target)
    written = written_results(node, target).values()
    arguments = sum(argument.is_write for argument in target._schema.arguments)
    return (
        not node.users
        and target.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in target.tags  # advances the generator
        and len(written) == arguments == len(target._schema.returns) > 0
        and not any(info.readers_after(argument, node) for argument in written)
        and all(
            alias.op not in ("placeholder", "get_attr")
            for argument in written
            for alias in info.sharing(argument)
        )
    )


# Lowering, second part: in-place kernels, and which memory they may overwrite.
#
# This runs last, when the graph no longer has to be functional. An in-place kernel overwrites an
# activation if that cannot be observed, and a copy of it otherwise. The report contains the
# reason.
#
# ============================  ================================================================
# the activation                is copied because
# ============================  ================================================================
# overlaps itself               several indices refer to one element (expanded tensors)
# overlaps another argument     the kernel would read elements that it has overwritten
# is a constant                 the next call of the graph would read the new values
# is an input of the graph      the caller did not donate it
# is used later                 a node reads it or a view of it, or the graph returns it
# is viewed as another dtype    Inductor cannot write through such a view
# has another layout            the op promises a different layout for the output
# ============================  ================================================================
#
# A kernel with a functional form is called in that form instead of with copies.


INSTEAD = "another activation may not be reused, so the kernel's functional form runs"


def lower_inplace(info: graph.GraphInfo, context: Context) -> None:
    """Replace the remaining ops with their kernels, reusing memory where that is sound.

    Ops that a kernel calls are lowered in the same way.

    Raises:
        CompileError: implementations call each other recursively.
    """
    remove_dead_writes(_lower_calls(info, context, _lower_inplace))


def _lower_inplace(call: graph.IrCall, info: graph.GraphInfo, context: Context) -> bool:
    selection = context.plan.select(call)
    described = context.describe(call, selection, "lower in place")
    trace = context.tracer.trace(selection.impl, call.fakes, autocast=call.autocast)
    if not trace.failure:
        check_outputs(call, selection, trace)
    if selection.impl.inplace and not trace.failure:
        layouts_differ = not _keeps_promise(call, trace)
        refusals = _refusals(call, info, context, layouts_differ=layouts_differ)
        functional = selection.impl.functional_fn if any(refusals.values()) else None
        if functional is not None:
            trace = context.tracer.trace(selection.impl, call.fakes, functional)
            refusals = {name: why or INSTEAD for name, why in refusals.items()}
        else:
            call = _with_copies(call, refusals, info, contiguous=layouts_differ)
            trace = context.tracer.trace(selection.impl, call.fakes)
        for name, why in refusals.items():
            reuse = Reuse(name, not why, why, copied=bool(why) and functional is None)
            described.reuse.append(reuse)
            logger.debug("    %s %s %s", reuse.verb, name, why)
    obstacle = trace.failure or _obstacle(call, selection, trace)
    if obstacle:
        described.stage = f"kept as a call: {obstacle}"
        graph.annotate(call, using=f"{selection.provider}!", autocast=call.autocast)
        call.node.meta[_KEPT] = True
        return False
    for reuse in described.reuse:
        if reuse.reused:
            info.own(call.argument(reuse.activation))
    _insert(call, trace, info)
    return True


def _refusals(
    call: graph.IrCall, info: graph.GraphInfo, context: Context, *, layouts_differ: bool
) -> dict[str, str]:
    """Return for every activation why it must be copied, or an empty string."""
    reasons = {}
    for position, name in enumerate(call.op.schema.names):
        value = call.values[position]
        if name not in call.op.activations or not isinstance(value, Node):
            continue
        if not context.plan.options.inplace:
            reasons[name] = "the option inplace is off"
        elif layouts_differ and not graph.fake_of(value).is_contiguous():
            reasons[name] = "has another layout than the op promises for its output"
        else:
            reasons[name] = _refusal(call, position, info)
    return reasons


def _refusal(call: graph.IrCall, position: int, info: graph.GraphInfo) -> str:
    """Return why the activation at *position* must be copied, or an empty string."""
    node = call.values[position]
    if any(overlaps_itself(t) for t in graph.tensors_of(node)):
        return "its elements overlap"
    for other in flat_nodes([v for i, v in enumerate(call.values) if i != position]):
        if graph.overlap(node, other):
            return f"shares memory with another argument, {other.name}"
    for alias in info.sharing(node):
        if {t.dtype for t in graph.tensors_of(alias)} != {t.dtype for t in graph.tensors_of(node)}:
            return f"is viewed with another dtype, by {alias.name}"
        if alias.op == "get_attr":
            return f"is a constant of the graph, {alias.target}"
        if alias.op == "placeholder" and position not in call.donate and not info.owns(node):
            return f"is an input of the graph, {alias.name}, that the caller did not donate"
    late = info.readers_after(node, call.node)
    if late:
        user = "the graph returns it" if late[0].op == "output" else f"{late[0].name} reads it"
        return f"{user} afterwards"
    return ""


def _with_copies(
    call: graph.IrCall, refusals: dict[str, str], info: graph.GraphInfo, *, contiguous: bool
) -> graph.IrCall:
    values = list(call.values)
    for position, name in enumerate(call.op.schema.names):
        if refusals.get(name):
            layout = torch.contiguous_format if contiguous else torch.preserve_format
            values[position] = _copy(call.node, values[position], layout)
            info.add(values[position], call.node)
    return with_changes(call, values=tuple(values))


def _copy(before: Node, node: Node, layout: torch.memory_format) -> Node:
    target, fake = torch.ops.aten.clone.default, graph.fake_of(node)
    with before.graph.inserting_before(before):
        new = before.graph.call_function(target, (node,), {"memory_format": layout})
    with fake.fake_mode:
        new.meta["val"] = target(fake, memory_format=layout)
    new.meta["stack_trace"] = before.stack_trace
    return new


def _insert(call: graph.IrCall, trace: AtenTrace, info: graph.GraphInfo) -> None:
    last = call.node.prev
    outputs = inline(info.graph, trace, call.node, arguments(call))
    while last.next is not call.node:
        last = last.next
        info.add(last, call.node)
    parts = call.node.users if call.op.schema.returns_tuple else ()
    info.forget([call.node, *parts])
    info.renew(graph.replace(call, outputs))


def _obstacle(call: graph.IrCall, selection: Selection, trace: AtenTrace) -> str:
    if not _keeps_promise(call, trace):
        return "the layout of its output is not the one that the op promises"
    if selection.impl.inplace and selection.impl.rejection(call.fakes) is not None:
        return "the kernel does not support the copies"
    return ""


def _keeps_promise(call: graph.IrCall, trace: AtenTrace) -> bool:
    """Return whether the outputs have the shapes, strides and dtypes that the op promises."""
    return all(
        p.shape == r.shape and p.dtype == r.dtype and _strides(p) == _strides(r)
        for p, r in zip(graph.tensors_of(call.node), map(graph.fake_of, trace.outputs), strict=True)
    )


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of the dimensions with more than one element; the others do not matter."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in dims if decided(size != 1, otherwise=True)]
