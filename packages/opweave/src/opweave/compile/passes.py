"""The small passes: autocast, donation, gradients, no-ops, dead writes, plugins' passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from opweave.compile import compat
from opweave.compile import graph as graphs
from opweave.compile.aliasing import expression, same_layout
from opweave.compile.options import CompileError, PluginPassError, UseAfterDonationError
from opweave.compile.plan import Context, PluginPass
from opweave.compile.report import WITH_GRADIENTS
from opweave.ir.errors import described
from opweave.ir.op import tensors_in
from opweave.ir.selection import native_for, policy_for, select
from opweave.ir.torch_ops import to_text

# Topological sort and dead code elimination.


def clean_up(info: graphs.GraphInfo, context: Context) -> None:
    """Sort the nodes topologically, and remove unused nodes that do not write to memory."""
    compat.sort_topologically(info.graph)
    info.graph.eliminate_dead_code()
    if unused := len(info.nodes) - len(info.graph.nodes):
        context.notes.append(f"{unused} unused nodes")


# No-op elimination: remove no-ops, which would prevent the fusion of the ops around them.
#
# ==================================  ==========================================
# node                                is replaced with
# ==================================  ==========================================
# a view equal to its base            the base
# a reshape of a reshape              one reshape
# ``slice_scatter`` of all elements   the scattered tensor
# a split equal to an earlier split   the earlier split
# ==================================  ==========================================
#
# Clones are kept, because the user may need them. Several slices of one tensor are kept too:
# merging them into a split would change the code that plain ``torch.compile`` generates.


aten = torch.ops.aten
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_ALL_VIEWS = graphs.VIEWS | {
    aten.slice.Tensor, aten.expand.default, aten.permute.default, aten.transpose.int,
    aten.as_strided.default,
}  # fmt: skip


def eliminate_noops(info: graphs.GraphInfo, context: Context) -> None:
    """Remove no-op views and duplicate splits."""
    splits: dict[Any, Node] = {}
    for node in info.nodes:
        if node.op != "call_function":
            continue
        _skip_reshape(node, info)
        if node in info.returned:
            replacement = _returned_replacement(node, info)
        else:
            replacement = _replacement(node, splits)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            info.graph.erase_node(node)
            context.notes.append(f"{node.name} is {replacement}")


def _replacement(node: Node, splits: dict[Any, Node]) -> Node | None:
    """Return an earlier node with the value of *node*, if there is one."""
    if node.target in _ALL_VIEWS and _is_same_view(node.args[0], node):
        return cast("Node", node.args[0])
    if node.target is aten.slice_scatter.default and _has_layout_of(node.args[1], node):
        return cast("Node", node.args[1])
    if node.target in _SPLITS:
        first = splits.setdefault(_key(node), node)
        return first if first is not node else None
    return None


def _returned_replacement(node: Node, info: graphs.GraphInfo) -> Node | None:
    """Return an earlier node with the value of an output, if the graph may return its memory.

    AOTAutograd has recorded which outputs share memory with inputs and with each other.
    """
    if node.target is not aten.slice_scatter.default or not _has_layout_of(node.args[1], node):
        return None
    source = cast("Node", node.args[1])
    aliases = info.sharing(source)
    is_new = all(alias.op == "call_function" and alias not in info.returned for alias in aliases)
    return source if is_new else None


def _skip_reshape(node: Node, info: graphs.GraphInfo) -> None:
    """Let a reshape of a reshape use the input of the first one, if that is contiguous."""
    first = node.args[0] if node.target in _RESHAPES else None
    if not isinstance(first, Node) or first.target not in _RESHAPES or first in info.returned:
        return
    source = cast("Node", first.args[0])
    value, result = graphs.fake_of(source), graphs.fake_of(node)
    is_view = compat.storage_key(value) == compat.storage_key(result)  # neither reshape copies
    if isinstance(value, Tensor) and value.is_contiguous() and is_view:
        node.args = (source, *node.args[1:])


def _is_same_view(viewed: object, view: Node) -> bool:
    if not _has_layout_of(viewed, view):
        return False
    offsets = (graphs.fake_of(node).storage_offset() for node in (cast("Node", viewed), view))
    first, second = map(expression, offsets)
    return bool(first == second)


def _has_layout_of(node: object, other: Node) -> bool:
    """Return whether two nodes have the same sizes and strides, for all dynamic sizes."""
    return isinstance(node, Node) and same_layout(graphs.fake_of(node), graphs.fake_of(other))


def _key(node: Node) -> Any:
    return node.target, repr(node.args), repr(sorted(node.kwargs.items()))


# Autocast: annotate each IR op with the ``torch.autocast`` state of its call.
#
# AOTAutograd traces the casts of torch's own operators and drops the autocast regions, but IR
# ops stay opaque. So each call becomes ``op_annotated(..., autocast="cpu=bfloat16")``, and is
# later lowered to its native implementation under that state, as in eager mode. Ops that
# autocast does not apply to need no annotation.


_ENTER = compat.ENTER_AUTOCAST
_EXIT = compat.EXIT_AUTOCAST
_WRAP = "wrap_with_autocast"  # the higher-order op of torch.export for a block
Overrides = Mapping[str, torch.dtype | None]  # device type -> dtype; None if disabled


def carry_autocast(info: graphs.GraphInfo, context: Context, now: Overrides | None = None) -> None:
    """Annotate every call under autocast, set by the caller or by a block in the program.

    Args:
        info: the graph.
        context: the context of the compilation.
        now: the state at the beginning of a subgraph that differs from that of the caller.

    Raises:
        CompileError: a control-flow subgraph runs under two autocast states.
    """
    now = now or {}
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
            subgraphs = graphs.named_graphs(node.graph.owning_module, node.all_input_nodes)
            for module in subgraphs.values() if inside else ():
                carry_autocast(graphs.GraphInfo(module.graph), context, inside)


def _annotate(call: graphs.IrCall, now: Overrides, context: Context) -> None:
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
        graphs.annotate(call, using=using, donate=call.donate, autocast=text)
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


# Donation: record in the graph which inputs ``maybe_inplace`` donates.
#
# ``op.maybe_inplace(x, r, w)`` becomes ``op_annotated(x, r, w, donate=[0, 1])``, a functional
# op. The donations are part of the graph, so a cache hit cannot lose them. It is an error if a
# later node provably reads an element of a donated tensor, through any alias. If the aliasing is
# uncertain, the kernel gets a copy instead, see :mod:`opweave.compile.lowering`.


def carry_donations(info: graphs.GraphInfo, context: Context) -> None:
    """Rewrite every ``maybe_inplace``, and check that donated tensors are not read later.

    Raises:
        UseAfterDonationError: a donated tensor is read later.
    """
    for call in info.calls.values():
        if call.donate:
            _check_not_read(call, info)
            if call.node.target is not call.op.torch_ops.annotated:
                graphs.annotate(call, donate=call.donate)
            names = ", ".join(call.op.schema.names[position] for position in call.donate)
            context.notes.append(f"{call.node.name} donates {names}")


def donated_inputs(info: graphs.GraphInfo) -> list[int]:
    """Return the positions of the graph inputs whose memory a call donates."""
    aliases = {
        alias
        for call in info.calls.values()
        for donated in donated_nodes(call)
        for alias in info.sharing(donated)
    }
    return [position for position, node in enumerate(info.inputs) if node in aliases]


def donated_nodes(call: graphs.IrCall) -> list[Node]:
    """Return the nodes that *call* donates."""
    values = [call.values[position] for position in call.donate]
    return [value for value in values if isinstance(value, Node)]


def _check_not_read(call: graphs.IrCall, info: graphs.GraphInfo) -> None:
    for donated in donated_nodes(call):
        late = info.readers_after(donated, call.node, certainly=True)
        if late:
            name = call.op.schema.names[call.values.index(donated)]
            use = "it is returned" if late[0].op == "output" else graphs.source_line(late[0])
            raise UseAfterDonationError(
                f"{name!r} was donated to {call.op.name}.maybe_inplace, and its memory is used "
                f"again later.\n"
                f"  donated: {graphs.source_line(call.node)}\n"
                f"  used:    {use}\n"
                f"Call {call.op.name} instead of maybe_inplace, or donate a clone."
            )


# Gradients: report calls with gradients, which AOTAutograd traces through.
#
# If an argument requires a gradient, the op runs a differentiable implementation, usually
# native, while AOTAutograd traces the graph. Such calls do not reach the later stages, so they
# are added to the report here.


def note_gradients(info: graphs.GraphInfo, context: Context) -> None:
    """Report the implementations of differentiated calls, without changing the graph."""
    for call in info.calls.values():
        # Dynamo ran the call on fake tensors, in the grad mode of this place in the program.
        if any(tensor.requires_grad for tensor in graphs.tensors_of(call.node)):
            policy = policy_for(call.op, call.call_site, differentiable=True)
            selection = select(call.op, call.fakes, policy)
            selection = native_for(selection) if call.autocast else selection
            context.describe(call, selection, WITH_GRADIENTS)


# Run plugin passes, and validate and complete the graphs that they return.


_VALUES = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, list, tuple)


def run_plugin_pass(step: PluginPass, info: graphs.GraphInfo, context: Context) -> None:
    """Run a plugin pass on a graph in-place.

    Raises:
        PluginPassError: the pass raised, or left an invalid graph.
    """
    graph, before = info.graph, _interface(info.graph)
    try:
        step.function(graph, context)
        _check_interface(before, _interface(graph))
        compat.sort_topologically(graph)
        for node in graph.nodes:
            _check_node(node)
            _complete(node)
        clean_up(graphs.GraphInfo(graph), context)
        graph.lint()
    except (Exception, SystemExit) as error:
        by = f" of plugin {step.owner}" if step.owner else ""
        raise PluginPassError(
            f"compiler pass {step.name}{by} failed: {described(error)}. Fix it, or "
            "compile with the option plugin_passes=False."
        ) from error


def _interface(graph: Graph) -> dict[str, Any]:
    """Return the inputs and outputs of *graph*, which a pass must not change."""
    outputs = [node.args[0] for node in graph.nodes if node.op == "output"]
    return {
        "inputs": [node.name for node in graph.find_nodes(op="placeholder")],
        "output nodes": len(outputs),
        "outputs": sum(len(o) if isinstance(o, (list, tuple)) else 1 for o in outputs),
    }


def _check_interface(before: dict[str, Any], after: dict[str, Any]) -> None:
    for part, value in before.items():
        if after[part] != value:
            raise ValueError(
                f"the pass changed the {part} of the graph from {value} to {after[part]}"
            )


def _check_node(node: Node) -> None:
    """Raise if *node* is an invalid call of an IR op."""
    call = graphs.ir_call(node)  # validates the arguments
    for operand in node.all_input_nodes if call else ():
        value = operand.meta.get("val")
        if not isinstance(value, _VALUES):
            raise TypeError(f"meta['val'] of {operand.name} is a {type(value).__name__}")


def _complete(node: Node) -> None:
    """Compute the fake value of a node that does not have one."""
    if node.op == "call_function" and "val" not in node.meta:
        tensors = [t for operand in node.all_input_nodes for t in graphs.tensors_of(operand)]
        node.meta["val"] = graphs.computed_fake(node, compat.fake_mode_of(tensors))
