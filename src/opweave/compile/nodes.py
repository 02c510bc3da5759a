"""Calls of IR ops as nodes of an FX graph."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from os.path import dirname, join
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from opweave import ir
from opweave.compile import compat
from opweave.compile.relocation import Relocation, same_layout
from opweave.ir import IrOp
from opweave.ir.priority import Entries
from opweave.ir.torch_ops import call_site, find_target

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n +([^\n]*))?')
_ROOT = re.compile(r"^L\.'\w+'(\._modules)?\.?")
_OPWEAVE = join(dirname(dirname(ir.__file__)), "")
# Where a source line is looked for: the user's code, else opweave's models and other callers of
# layers, else the layers. Frames of torch and of the adapters are never the place of a call.
_NEVER = (
    join(dirname(torch.__file__), ""),
    *(join(_OPWEAVE, name, "") for name in ("base", "ir", "integrations")),
)
_NOT_IN = ((_OPWEAVE,), (join(_OPWEAVE, "layers", ""),), ())


@dataclass(frozen=True)
class IrCall:
    """A node that calls an IR op, and what the call says.

    Attributes:
        node: the node.
        op: the op.
        values: one value per parameter of the op, nodes where the graph computes them.
        call_site: the priority that ``op.using(...)`` named.
        donate: the positions of the parameters that the caller gives up.
        autocast: the state of autocast that it is made under, see :mod:`opweave.ir.autocast`.
    """

    node: Node
    op: IrOp
    values: tuple[Any, ...]
    call_site: Entries
    donate: tuple[int, ...]
    autocast: str = ""

    @property
    def fakes(self) -> tuple[Any, ...]:
        """The values with fake tensors and symbolic integers in place of nodes."""
        return tuple(map_arg(list(self.values), fake_of))

    def argument(self, name: str) -> Any:
        """Return the value of parameter *name*."""
        return self.values[self.op.schema.names.index(name)]


def ir_call(node: Node) -> IrCall | None:
    """Return the IR call that *node* is, or None if it is something else."""
    target = find_target(node.target) if node.op == "call_function" else None
    if target is None:
        return None
    kwargs = dict(node.kwargs)
    using, donate = "", tuple(target.op.activation_indices if target.donates else ())
    autocast = ""
    if target.annotated:
        using, autocast = (str(kwargs.pop(name, "")) for name in ("using", "autocast"))
        donate = _integers(kwargs.pop("donate", None) or ())
    values = target.op.bind(*node.args, **kwargs)
    return IrCall(node, target.op, values, call_site(using), donate, autocast)


def annotate(
    call: IrCall, *, using: str = "", donate: Sequence[int] = (), autocast: str = ""
) -> None:
    """Let *call* say of itself what is given, and nothing else."""
    args, kwargs = call_arguments(call.op, call.values)
    said: dict[str, Any] = {"using": using, "donate": list(donate), "autocast": autocast}
    call.node.target = call.op.torch_ops.annotated
    call.node.args = args
    call.node.kwargs = {**kwargs, **{name: value for name, value in said.items() if value}}


def call_arguments(op: IrOp, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``(args, kwargs)`` for a node that calls *op*, defaults left out.

    That is how AOTAutograd writes calls, and Inductor expects them.
    """
    pairs = list(zip(op.schema.params, values, strict=True))
    changed = [not p.has_default or isinstance(v, Node) or v != p.default for p, v in pairs]
    args, kwargs = op.schema.split(values)
    positional = [c for (p, _), c in zip(pairs, changed, strict=True) if not p.keyword_only]
    while positional and not positional[-1]:
        positional.pop()
    named = {p.name for (p, _), c in zip(pairs, changed, strict=True) if c}
    return args[: len(positional)], {k: v for k, v in kwargs.items() if k in named}


def ir_calls(graph: Graph) -> list[IrCall]:
    """Return every IR call of *graph* in order, those in control-flow subgraphs left out."""
    return [call for node in graph.nodes if (call := ir_call(node))]


def replace(call: IrCall, outputs: Sequence[Node]) -> list[Node]:
    """Let the users of *call* use *outputs* instead, and erase it.

    The result is that of :func:`substitute`.
    """
    renewed: list[Node] = []
    if not call.op.schema.returns_tuple:
        renewed += substitute(call.node, outputs[0])
    for user in list(call.node.users):
        if user.target is not operator.getitem:
            raise ValueError(f"{user.name} uses the tuple {call.node.name} as a whole")
        renewed += substitute(user, outputs[cast("int", user.args[1])])
        user.graph.erase_node(user)
    call.node.graph.erase_node(call.node)
    return renewed


def substitute(old: Node, new: Node) -> list[Node]:
    """Let the users of *old* use *new*, and note what views of it are views of now.

    Who shares memory with whom is read off the storages of fake values, so those of views must
    follow what they are views of. Returns the nodes whose fake values are new.
    """
    renewed: list[Node] = []
    stale = {compat.storage_key(tensor) for tensor in tensors_of(old)}
    waiting = list(old.users)
    move = _mover(old, new)
    old.replace_all_uses_with(new)
    while waiting:
        user = waiting.pop()
        if user.op != "call_function" or "val" not in user.meta:
            continue
        if stale & {compat.storage_key(tensor) for tensor in tensors_of(user)}:
            move(user)
            renewed.append(user)
            waiting += user.users
    return renewed


def _mover(old: Node, new: Node) -> Callable[[Node], None]:
    """Return what gives a view of *old* the fake value that it has as a view of *new*."""
    before, after = (tensors_of(node) for node in (old, new))  # none where a plugin made the node
    if len(before) != 1 or len(after) != 1 or not same_layout(before[0], after[0]):
        return _refresh
    relocation = Relocation(cast("Any", after[0]).fake_mode)
    relocation.put(before[0], after[0])

    def move(node: Node) -> None:
        if not all(map(compat.is_plain_fake, tensors_of(node))):
            _refresh(node)
            return
        with torch.no_grad(), compat.no_modes():
            node.meta["val"] = relocation.move(node.meta["val"])

    return move


def _refresh(node: Node) -> None:
    """Compute the fake value of *node* from those of its arguments, as they are now."""
    args, kwargs = map_arg((node.args, node.kwargs), fake_of)
    mode = compat.fake_mode_of(tensors_of(node))
    with torch.no_grad(), mode or nullcontext():
        node.meta["val"] = cast("Any", node.target)(*args, **kwargs)


def fake_of(node: Node) -> Any:
    """Return the fake value that the tracer noted for *node*.

    Raises:
        KeyError: there is none; see :func:`has_fakes`.
    """
    meta = node.meta
    return meta["val"] if "val" in meta else meta["example_value"]


def has_fakes(graph: Graph) -> bool:
    """Whether the tracer noted fake values."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return all("val" in node.meta or "example_value" in node.meta for node in inputs)


def all_graphs(graph_module: GraphModule) -> list[GraphModule]:
    """Return *graph_module* and the graphs that control flow in it runs (cond, while_loop, ...).

    Each comes before those inside of it.
    """
    inside = named_graphs(graph_module, graph_module.graph.nodes).values()
    return [graph_module, *(each for module in inside for each in all_graphs(module))]


def inner_graphs(node: Node) -> list[GraphModule]:
    """Return the graphs that *node* runs, as control flow does."""
    return list(named_graphs(node.graph.owning_module, node.all_input_nodes).values())


def named_graphs(owner: GraphModule | None, nodes: Iterable[Node]) -> dict[str, GraphModule]:
    """Return the graphs among *nodes*, by what *owner* calls them."""
    names = sorted({str(node.target) for node in nodes if node.op == "get_attr"})
    found = {name: getattr(owner, name, None) for name in names}
    return {name: module for name, module in found.items() if isinstance(module, GraphModule)}


def source_line(node: Node) -> str:
    """Return the innermost line of the user's source that made *node*: ``file:line: code``."""
    frames = _FRAME.findall(node.stack_trace or "")
    for excluded in _NOT_IN:
        own = [frame for frame in frames if not frame[0].startswith((*_NEVER, *excluded))]
        if own:
            file, number, code = own[-1]
            return f"{file}:{number}: {code.strip()}" if code else f"{file}:{number}"
    return f"node {node.name} (no source line is known)"


def module_path(node: Node) -> str:
    """Return the path of the innermost module that made *node*, or "" outside of modules.

    ``L['self'].model.layers.0.mlp`` in the graph is ``model.layers.0.mlp``.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return _ROOT.sub("", path.replace("[", ".").replace("]", ""))


def tensors_of(node: Node) -> list[torch.Tensor]:
    """Return the fake tensors that *node* stands for: none, one or several."""
    try:
        value = fake_of(node)
    except KeyError:
        return []
    items: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(int(item) for item in value)
