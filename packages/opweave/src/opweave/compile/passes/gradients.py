"""Gradients: report calls with gradients, which AOTAutograd traces through.

If an argument requires a gradient, the op runs a differentiable implementation, usually native,
while AOTAutograd traces the graph. Such calls do not reach the later stages, so they are added to
the report here.
"""

from __future__ import annotations

from opweave.compile.context import Context
from opweave.compile.graph_info import GraphInfo
from opweave.compile.nodes import IrCall, tensors_of
from opweave.compile.report import WITH_GRADIENTS
from opweave.ir.selection import native_for, policy_for, select


def note_gradients(info: GraphInfo, context: Context) -> None:
    """Report the implementations of differentiated calls, without changing the graph."""
    for call in filter(_is_differentiated, info.calls.values()):
        policy = policy_for(call.op, call.call_site, differentiable=True)
        selection = select(call.op, call.fakes, policy)
        context.describe(
            call, native_for(selection) if call.autocast else selection, WITH_GRADIENTS
        )


def _is_differentiated(call: IrCall) -> bool:
    # Dynamo ran the call on fake tensors, in the grad mode of this place in the program.
    return any(tensor.requires_grad for tensor in tensors_of(call.node))
