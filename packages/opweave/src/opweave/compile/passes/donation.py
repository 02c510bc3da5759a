"""Donation: record in the graph which inputs ``maybe_inplace`` donates.

``op.maybe_inplace(x, r, w)`` becomes ``op_annotated(x, r, w, donate=[0, 1])``, a functional op. The
donations are part of the graph, so a cache hit cannot lose them. It is an error if a later node
provably reads an element of a donated tensor, through any alias. If the aliasing is uncertain, the
kernel gets a copy instead, see :mod:`opweave.compile.passes.reuse`.
"""

from __future__ import annotations

from torch.fx import Node

from opweave.compile.context import Context
from opweave.compile.errors import UseAfterDonationError
from opweave.compile.graph_info import GraphInfo
from opweave.compile.nodes import IrCall, annotate, source_line


def carry_donations(info: GraphInfo, context: Context) -> None:
    """Rewrite every ``maybe_inplace``, and check that donated tensors are not read later.

    Raises:
        UseAfterDonationError: a donated tensor is read later.
    """
    for call in info.calls.values():
        if call.donate:
            _check(call, info)
            if call.node.target is not call.op.torch_ops.annotated:
                annotate(call, donate=call.donate)
            names = ", ".join(call.op.schema.names[position] for position in call.donate)
            context.notes.append(f"{call.node.name} donates {names}")


def donated_inputs(info: GraphInfo) -> list[int]:
    """Return the positions of the graph inputs whose memory a call donates."""
    given = {
        alias
        for call in info.calls.values()
        for donated in donated_nodes(call)
        for alias in info.sharing(donated)
    }
    return [position for position, node in enumerate(info.inputs) if node in given]


def donated_nodes(call: IrCall) -> list[Node]:
    """Return the nodes that *call* donates."""
    values = [call.values[position] for position in call.donate]
    return [value for value in values if isinstance(value, Node)]


def _check(call: IrCall, info: GraphInfo) -> None:
    for donated in donated_nodes(call):
        late = info.readers_after(donated, call.node, certainly=True)
        if late:
            name = call.op.schema.names[call.values.index(donated)]
            use = "it is returned" if late[0].op == "output" else source_line(late[0])
            raise UseAfterDonationError(
                f"{name!r} was donated to {call.op.name}.maybe_inplace, and its memory is used "
                f"again later.\n"
                f"  donated: {source_line(call.node)}\n"
                f"  used:    {use}\n"
                f"Call {call.op.name} instead of maybe_inplace, or donate a clone."
            )
