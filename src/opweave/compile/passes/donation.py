"""Donation: what ``maybe_inplace`` says becomes part of the graph.

``op.maybe_inplace(x, r, w)`` turns into ``op_annotated(x, r, w, donate=[0, 1])``, a functional op
that carries its donations itself, where no cache can lose them. Reading an element of a donated
tensor later, under any name, is an error here. Where memory is not known to be shared, nor to be
separate, it is not: the kernel then gets a copy, see :mod:`opweave.compile.passes.reuse`.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from opweave.compile.aliases import Aliases
from opweave.compile.context import Context
from opweave.compile.errors import UseAfterDonationError
from opweave.compile.nodes import IrCall, annotate, ir_calls, source_line


def carry_donations(graph: Graph, context: Context) -> None:
    """Rewrite every ``maybe_inplace``, and check that nothing reads what was donated.

    Raises:
        UseAfterDonationError: something does.
    """
    aliases = Aliases(graph)
    for call in ir_calls(graph):
        if call.donate:
            _check(call, aliases)
            context.notes.append(_annotate(call))


def donated_inputs(graph: Graph) -> list[int]:
    """Return the positions of the graph's inputs whose memory some call donates."""
    aliases = Aliases(graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    given = {
        alias
        for call in ir_calls(graph)
        for donated in donated_nodes(call)
        for alias in aliases.sharing(donated)
    }
    return [position for position, node in enumerate(inputs) if node in given]


def donated_nodes(call: IrCall) -> list[Node]:
    """Return the nodes that *call* donates."""
    values = [call.values[position] for position in call.donate]
    return [value for value in values if isinstance(value, Node)]


def _annotate(call: IrCall) -> str:
    node = call.node
    if node.target is not call.op.torch_ops.annotated:
        annotate(call, donate=call.donate)
    return f"{node.name} donates {_names(call)}"


def _check(call: IrCall, aliases: Aliases) -> None:
    for donated in donated_nodes(call):
        late = aliases.readers_after(donated, call.node, certainly=True)
        if late:
            position = call.values.index(donated)
            raise UseAfterDonationError(
                f"{call.op.name}.maybe_inplace was given {call.op.schema.names[position]!r}, and "
                f"its memory is used again later.\n"
                f"  donated: {source_line(call.node)}\n"
                f"  used:    {_use(late[0])}\n"
                f"Call {call.op.name} itself instead of maybe_inplace, or donate a clone."
            )


def _use(node: Node) -> str:
    return "it is returned" if node.op == "output" else source_line(node)


def _names(call: IrCall) -> str:
    return ", ".join(call.op.schema.names[position] for position in call.donate)
