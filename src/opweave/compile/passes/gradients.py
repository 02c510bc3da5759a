"""Gradients: calls that AOTAutograd traces through, because autograd has to record them.

Where an argument requires a gradient, the torch op of a call runs a differentiable implementation,
usually native, while AOTAutograd traces the graph. No such call reaches the later stages, so it is
entered into the report here.
"""

from __future__ import annotations

from torch.fx import Graph

from opweave.compile.context import Context
from opweave.compile.nodes import IrCall, ir_calls, tensors_of
from opweave.compile.report import WITH_GRADIENTS
from opweave.ir.selection import native_for, policy_for, select


def note_gradients(graph: Graph, context: Context) -> None:
    """Enter the implementations of differentiated calls into the report; change nothing."""
    for call in filter(_is_differentiated, ir_calls(graph)):
        policy = policy_for(call.op, call.call_site, differentiable=True)
        selection = select(call.op, call.fakes, policy)
        context.describe(
            call, native_for(selection) if call.autocast else selection, WITH_GRADIENTS
        )


def _is_differentiated(call: IrCall) -> bool:
    # Dynamo ran the call on fake tensors, in the grad mode that holds at this place of the program.
    return any(tensor.requires_grad for tensor in tensors_of(call.node))
