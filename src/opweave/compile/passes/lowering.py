"""Lowering A: ops whose implementation is functional become what the implementation computes.

It runs before Inductor's own passes, which then see plain aten, as if the user had written the
implementation in place of the op.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from opweave.compile.context import Context
from opweave.compile.errors import CompileError
from opweave.compile.nodes import IrCall, annotate, fake_of, ir_call, ir_calls, replace, tensors_of
from opweave.compile.tracing import Trace, arguments, inline
from opweave.ir import Selection

STAGE = "lower functional"
KEPT = "opweave_kept"


def lower_functional(graph: Graph, context: Context) -> None:
    """Inline every functional implementation, and those inside of it."""
    later: set[Node] = set()
    while nodes := [call.node for call in ir_calls(graph) if call.node not in later]:
        for node in nodes:
            call = ir_call(node)  # anew: its arguments may have been replaced since
            if call and not _lower(graph, call, context):
                later.add(node)


def _lower(graph: Graph, call: IrCall, context: Context) -> bool:
    selection = context.plan.select(call)
    if selection.impl.inplace:
        return False
    trace = context.tracer.trace(selection.impl, call.fakes, autocast=call.autocast)
    if trace.failure or trace.mutates:
        return False
    if call.autocast:
        _check_dtypes(call, trace)
    context.describe(call, selection, STAGE)
    replace(call, inline(graph, trace, call.node, arguments(call)))
    return True


def keep_as_call(call: IrCall, selection: Selection) -> None:
    """Leave *call* to the op's own kernel, which is told to run what was selected."""
    annotate(call, using=f"{selection.provider}!", autocast=call.autocast)
    call.node.meta[KEPT] = True


def is_kept(call: IrCall) -> bool:
    """Whether :func:`keep_as_call` was here."""
    return KEPT in call.node.meta


def _check_dtypes(call: IrCall, trace: Trace) -> None:
    """Raise CompileError unless autocast leaves results with the dtypes that the graph expects."""
    expected = [tensor.dtype for tensor in tensors_of(call.node)]
    found = [fake_of(node).dtype for node in trace.outputs]
    if found != expected:
        raise CompileError(
            f"{call.op.name} returns {found} under torch.autocast ({call.autocast}), but its fake "
            f"implementation says {expected}. Call it under torch.autocast(..., enabled=False), or "
            "let the fake implementation ask torch.is_autocast_enabled()."
        )
