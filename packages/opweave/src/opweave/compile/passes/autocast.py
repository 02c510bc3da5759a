"""Autocast: annotate each IR op with the ``torch.autocast`` state of its call.

AOTAutograd traces the casts of torch's own operators and drops the autocast regions, but IR ops
stay opaque. So each call becomes ``op_annotated(..., autocast="cpu=bfloat16")``, and is later
lowered to its native implementation under that state, as in eager mode. Ops that autocast does not
apply to need no annotation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from opweave.compile import compat
from opweave.compile.context import Context
from opweave.compile.errors import CompileError
from opweave.compile.graph_info import GraphInfo
from opweave.compile.nodes import IrCall, annotate, inner_graphs
from opweave.ir.autocast import to_text
from opweave.ir.selection import tensors_in

_ENTER = compat.ENTER_AUTOCAST
_EXIT = compat.EXIT_AUTOCAST
_WRAP = "wrap_with_autocast"  # the higher-order op of torch.export for a block
Overrides = Mapping[str, torch.dtype | None]  # device type -> dtype; None if disabled


def carry_autocast(info: GraphInfo, context: Context) -> None:
    """Annotate every call under autocast, set by the caller or by a block in the program.

    Raises:
        CompileError: a control-flow subgraph runs under two autocast states.
    """
    _carry(info, {}, context)


def _carry(info: GraphInfo, now: Overrides, context: Context) -> None:
    before: dict[Node, Overrides] = {}  # the state outside a block, by the node that enters it
    for node in info.nodes:
        if node.target is _ENTER:
            before[node], now = now, {**now, **_entered(node)}
        elif node.target is _EXIT:
            now = before[node.all_input_nodes[0]]
        elif call := info.calls.get(node):
            _annotate(call, now, context)
        else:
            inside = {**now, **_entered(node)} if str(node.target) == _WRAP else now
            for module in inner_graphs(node) if inside else ():
                _carry(GraphInfo(module.graph), inside, context)


def _annotate(call: IrCall, now: Overrides, context: Context) -> None:
    if not call.op.autocast:
        return
    devices = {tensor.device.type for tensor in tensors_in(call.fakes)}
    text = to_text({d: dtype for d in devices if (dtype := _dtype(d, now)) is not None})
    if call.autocast and now and text != call.autocast:
        raise CompileError(
            f"{call.op.name} is in control flow that runs under two states of torch.autocast: "
            f"{call.autocast}, and {text or 'none'}. Call the function that contains it under one "
            "of them only."
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
    """Return the autocast dtype for a device type, set in the graph or by the caller."""
    if device in now:
        return now[device]
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
