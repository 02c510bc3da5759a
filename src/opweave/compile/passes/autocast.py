"""Autocast: what ``torch.autocast`` says where an op is called becomes part of the graph.

In eager mode, operators inside a native implementation cast as they do anywhere under autocast.
AOTAutograd writes the casts of torch's own operators out and drops the regions, but an op of the IR
stays whole. So it turns into ``op_annotated(..., autocast="cpu=bfloat16")``, and is lowered to its
native implementation under that state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from opweave.compile import compat
from opweave.compile.context import Context
from opweave.compile.errors import CompileError
from opweave.compile.nodes import IrCall, annotate, inner_graphs, ir_call
from opweave.ir.autocast import to_text
from opweave.ir.selection import tensors_in

_ENTER = compat.ENTER_AUTOCAST
_EXIT = compat.EXIT_AUTOCAST
_WRAP = "wrap_with_autocast"  # what torch.export makes of a block
Overrides = Mapping[str, torch.dtype | None]  # kind of device -> dtype, None: no autocast


def carry_autocast(graph: Graph, context: Context) -> None:
    """Annotate every call under autocast, be it the caller's or a block in the program.

    Raises:
        CompileError: a graph of control flow runs in two states.
    """
    _carry(graph, {}, context)


def _carry(graph: Graph, now: Overrides, context: Context) -> None:
    before: dict[Node, Overrides] = {}  # by the node that enters a block
    for node in graph.nodes:
        if node.target is _ENTER:
            before[node], now = now, {**now, **_entered(node)}
        elif node.target is _EXIT:
            now = before[node.all_input_nodes[0]]
        elif call := ir_call(node):
            _annotate(call, now, context)
        else:
            inside = {**now, **_entered(node)} if str(node.target) == _WRAP else now
            for module in inner_graphs(node) if inside else ():
                _carry(module.graph, inside, context)


def _annotate(call: IrCall, now: Overrides, context: Context) -> None:
    devices = {tensor.device.type for tensor in tensors_in(call.fakes)}
    text = to_text({d: dtype for d in devices if (dtype := _dtype(d, now)) is not None})
    if call.autocast and now and text != call.autocast:
        raise CompileError(
            f"{call.op.name} is in control flow that runs under two states of torch.autocast: "
            f"{call.autocast}, and {text or 'none'}. Call the function that holds it from one of "
            "them."
        )
    if text and not call.autocast:
        using = ",".join(map(str, call.call_site))
        annotate(call, using=using, donate=call.donate, autocast=text)
        context.notes.append(f"{call.node.name} is called under autocast, {text}")


def _entered(node: Node) -> Overrides:
    device, dtype, enabled = (*node.args, *node.kwargs.values())[:3]
    if not enabled:
        return {str(device): None}
    default = torch.get_autocast_dtype(str(device))
    return {str(device): dtype if isinstance(dtype, torch.dtype) else default}


def _dtype(device: str, now: Overrides) -> torch.dtype | None:
    """Return what operators cast to on a kind of device: here, or else around the graph."""
    if device in now:
        return now[device]
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
