"""Lowering, first part: inline functional implementations.

This runs before Inductor's own passes, which then see plain aten, as if the user had called the
implementation instead of the op.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from opweave.compile.context import Context
from opweave.compile.errors import CompileError
from opweave.compile.graph_info import GraphInfo
from opweave.compile.nodes import IrCall, annotate, fake_of, ir_call, replace, tensors_of
from opweave.compile.tracing import AtenTrace, arguments, inline
from opweave.ir import Selection

STAGE = "lower functional"
KEPT = "opweave_kept"
MAX_DEPTH = 16  # of implementations that call other ops; more than three are unusual


def lower_functional(info: GraphInfo, context: Context) -> None:
    """Inline every functional implementation, including those of ops that it calls.

    Raises:
        CompileError: implementations call each other recursively, or return invalid outputs.
    """
    later: set[Node] = set()
    for _ in range(MAX_DEPTH):
        calls = [call for node, call in info.calls.items() if node not in later]
        if not calls:
            return
        for node in [call.node for call in calls]:
            call = ir_call(node)  # again, because its arguments may have been replaced
            if call and not _lower(info.graph, call, context):
                later.add(node)
        info = info.current()  # the calls in inlined implementations come next
    raise CompileError(endless(calls, context))


def endless(calls: list[IrCall], context: Context) -> str:
    """Return the message for implementations that call each other recursively."""
    chosen = {call.op.name: context.plan.select(call).provider for call in calls}
    named = ", ".join(f"{provider!r} of {op}" for op, provider in chosen.items())
    return (
        f"implementations call each other, {MAX_DEPTH} deep or more: {named}. One of them calls "
        "the op that it implements; call the op's .native, or another op."
    )


def _lower(graph: Graph, call: IrCall, context: Context) -> bool:
    selection = context.plan.select(call)
    if selection.impl.inplace:
        return False
    trace = context.tracer.trace(selection.impl, call.fakes, autocast=call.autocast)
    if trace.failure or trace.mutates:
        return False
    check_outputs(call, selection, trace)
    context.describe(call, selection, STAGE)
    replace(call, inline(graph, trace, call.node, arguments(call)))
    return True


def keep_as_call(call: IrCall, selection: Selection) -> None:
    """Keep *call* as a call of the torch op, annotated to run the selected implementation."""
    annotate(call, using=f"{selection.provider}!", autocast=call.autocast)
    call.node.meta[KEPT] = True


def is_kept(call: IrCall) -> bool:
    """Return whether :func:`keep_as_call` was called for *call*."""
    return KEPT in call.node.meta


def check_outputs(call: IrCall, selection: Selection, trace: AtenTrace) -> None:
    """Check the number, dtypes and shapes of the outputs of an implementation.

    Raises:
        CompileError: they differ from the outputs that the graph expects.
    """
    wanted, returned = tensors_of(call.node), trace.outputs
    if len(wanted) == len(returned) and all(map(_alike, wanted, returned)):
        return
    expected, found = (", ".join(map(_described, outputs)) for outputs in (wanted, returned))
    who = f"{call.op.name}: the implementation {selection.provider!r} ({selection.impl.place})"
    if not call.autocast:
        raise CompileError(
            f"{who} returns ({found}), but the op's definition, or its fake implementation, "
            f"says ({expected}). Fix it, or remove the provider from the priority."
            f"{selection.impl.way_out}"
        )
    raise CompileError(
        f"{who} returns ({found}) under torch.autocast ({call.autocast}), but its fake "
        f"implementation says ({expected}). Call it under torch.autocast(..., enabled=False), or "
        f"check torch.is_autocast_enabled() in the fake implementation.{selection.impl.way_out}"
    )


def _alike(wanted: object, returned: object) -> bool:
    """Return whether two outputs may have the same shape and dtype.

    The trace may come from another call with other symbols, so dynamic sizes are not compared.
    """
    a, b = map(_fake, (wanted, returned))
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return (
        a.dtype == b.dtype
        and a.ndim == b.ndim
        and not any(
            (type(m) is int or type(n) is int) and statically_known_true(m != n)
            for m, n in zip(a.shape, b.shape, strict=True)
        )
    )


def _described(output: object) -> str:
    fake = _fake(output)
    if not isinstance(fake, Tensor):
        return type(fake).__name__
    return f"{fake.dtype}[{', '.join(map(str, fake.shape))}]"


def _fake(output: object) -> object:
    return fake_of(output) if isinstance(output, Node) else output
