"""Lowering, second part: in-place kernels, and which memory they may overwrite.

This runs last, when the graph no longer has to be functional. An in-place kernel overwrites an
activation if that cannot be observed, and a copy of it otherwise. The report contains the reason.

============================  ====================================================================
the activation                is copied because
============================  ====================================================================
overlaps itself               several indices refer to one element (expanded tensors)
overlaps another argument     the kernel would read elements that it has overwritten
is a constant                 the next call of the graph would read the new values
is an input of the graph      the caller did not donate it
is used later                 a node reads it or a view of it, or the graph returns it
is viewed as another dtype    Inductor cannot write through such a view
has another layout            the op promises a different layout for the output
============================  ====================================================================

A kernel with a functional form is called in that form instead of with copies.
"""

from __future__ import annotations

from dataclasses import replace as with_changes

import torch
from torch import Tensor
from torch.fx import Node

from opweave.base.compat import decided
from opweave.compile.context import Context
from opweave.compile.errors import CompileError
from opweave.compile.graph_info import GraphInfo, overlap
from opweave.compile.log import logger
from opweave.compile.nodes import IrCall, fake_of, ir_call, replace, tensors_of
from opweave.compile.passes.dead_writes import remove_dead_writes
from opweave.compile.passes.lowering import (
    MAX_DEPTH,
    check_outputs,
    endless,
    is_kept,
    keep_as_call,
)
from opweave.compile.report import Reuse
from opweave.compile.tracing import AtenTrace, arguments, flat_nodes, inline
from opweave.ir import Selection
from opweave.ir.memory import overlaps_itself

STAGE = "lower in place"
INSTEAD = "another activation may not be reused, so the kernel's functional form runs"


def lower_inplace(info: GraphInfo, context: Context) -> None:
    """Replace the remaining ops with their kernels, reusing memory where that is sound.

    Ops that a kernel calls are lowered in the same way.

    Raises:
        CompileError: implementations call each other recursively.
    """
    for _ in range(MAX_DEPTH):
        calls = [call for call in info.calls.values() if not is_kept(call)]
        if not calls:
            break
        for node in [call.node for call in calls]:
            call = ir_call(node)  # again, because its arguments may have been replaced
            if call:
                _lower(call, info, context)
        info = info.current()  # the calls in inlined implementations come next
    else:
        raise CompileError(endless(calls, context))
    remove_dead_writes(info)


def _lower(call: IrCall, info: GraphInfo, context: Context) -> None:
    selection = context.plan.select(call)
    described = context.describe(call, selection, STAGE)
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
        keep_as_call(call, selection)
        return
    for reuse in described.reuse:
        if reuse.reused:
            info.own(call.argument(reuse.activation))
    _insert(call, trace, info)


def _refusals(
    call: IrCall, info: GraphInfo, context: Context, *, layouts_differ: bool
) -> dict[str, str]:
    """Return for every activation why it must be copied, or an empty string."""
    reasons = {}
    for position, name in enumerate(call.op.schema.names):
        value = call.values[position]
        if name not in call.op.activations or not isinstance(value, Node):
            continue
        if not context.plan.options.inplace:
            reasons[name] = "the option inplace is off"
        elif layouts_differ and not fake_of(value).is_contiguous():
            reasons[name] = "has another layout than the op promises for its output"
        else:
            reasons[name] = _refusal(call, position, info)
    return reasons


def _refusal(call: IrCall, position: int, info: GraphInfo) -> str:
    """Return why the activation at *position* must be copied, or an empty string."""
    node = call.values[position]
    if any(overlaps_itself(t) for t in tensors_of(node)):
        return "its elements overlap"
    for other in flat_nodes([v for i, v in enumerate(call.values) if i != position]):
        if overlap(node, other):
            return f"shares memory with another argument, {other.name}"
    for alias in info.sharing(node):
        if {t.dtype for t in tensors_of(alias)} != {t.dtype for t in tensors_of(node)}:
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
    call: IrCall, refusals: dict[str, str], info: GraphInfo, *, contiguous: bool
) -> IrCall:
    values = list(call.values)
    for position, name in enumerate(call.op.schema.names):
        if refusals.get(name):
            layout = torch.contiguous_format if contiguous else torch.preserve_format
            values[position] = _copy(call.node, values[position], layout)
            info.add(values[position], call.node)
    return with_changes(call, values=tuple(values))


def _copy(before: Node, node: Node, layout: torch.memory_format) -> Node:
    target, fake = torch.ops.aten.clone.default, fake_of(node)
    with before.graph.inserting_before(before):
        new = before.graph.call_function(target, (node,), {"memory_format": layout})
    with fake.fake_mode:
        new.meta["val"] = target(fake, memory_format=layout)
    new.meta["stack_trace"] = before.stack_trace
    return new


def _insert(call: IrCall, trace: AtenTrace, info: GraphInfo) -> None:
    last = call.node.prev
    outputs = inline(info.graph, trace, call.node, arguments(call))
    while last.next is not call.node:
        last = last.next
        info.add(last, call.node)
    parts = call.node.users if call.op.schema.returns_tuple else ()
    info.forget([call.node, *parts])
    info.renew(replace(call, outputs))


def _obstacle(call: IrCall, selection: Selection, trace: AtenTrace) -> str:
    if not _keeps_promise(call, trace):
        return "the layout of its output is not the one that the op promises"
    if selection.impl.inplace and selection.impl.rejection(call.fakes) is not None:
        return "the kernel does not support the copies"
    return ""


def _keeps_promise(call: IrCall, trace: AtenTrace) -> bool:
    """Return whether the outputs have the shapes, strides and dtypes that the op promises."""
    promised = tensors_of(call.node)
    made = [fake_of(node) for node in trace.outputs]
    return all(
        p.shape == m.shape and p.dtype == m.dtype and _strides(p) == _strides(m)
        for p, m in zip(promised, made, strict=True)
    )


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of the dimensions with more than one element; the others do not matter."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in dims if decided(size != 1, otherwise=True)]
