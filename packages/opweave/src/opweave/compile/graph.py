"""Read and edit FX graphs that call IR ops, and facts about them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from os.path import dirname, join
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from opweave import ir
from opweave.compile import compat
from opweave.compile.aliasing import Relocation, coincide, same_layout, share_elements
from opweave.ir import IrOp
from opweave.ir.donation import covers
from opweave.ir.priority import Entries
from opweave.ir.registry import find_target
from opweave.ir.torch_ops import call_site
from opweave.packages import PROJECT, folders_of

# Read and edit FX nodes that call IR ops.


aten = torch.ops.aten
# Operators that keep the elements and their order; matching ignores them.
VIEWS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.flatten.using_ints, aten.alias.default,
}  # fmt: skip
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n +([^\n]*))?')
_ROOT = re.compile(r"^L\.'\w+'(\._modules)?\.?")
_PACKAGES = tuple(join(folder, "") for name in PROJECT for folder in folders_of(name))
_OPWEAVE = join(dirname(dirname(ir.__file__)), "")
# source_line() searches the user's code first, then opweave's models and other callers of layers,
# then the layers. It always skips torch, the IR and the adapters of other packages' models.
_NEVER = (
    join(dirname(torch.__file__), ""),
    *(join(_OPWEAVE, name, "") for name in ("ir", "optimization")),
    *(join(folder, name, "") for folder in _PACKAGES for name in ("transformers", "vllm_api")),
)
_NOT_IN = (_PACKAGES, (join(_OPWEAVE, "layers", ""),), ())


@dataclass(frozen=True)
class IrCall:
    """A node that calls an IR op.

    Attributes:
        node: the node.
        op: the op.
        values: one value per parameter of the op; a node if the graph computes it.
        call_site: the priority given by ``op.using(...)``.
        donate: the positions of the donated parameters.
        autocast: the autocast state of the call, see :mod:`opweave.ir.torch_ops`.
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
    """Return *node* as an IR call, or None if it does not call an IR op."""
    target = find_target(node.target) if node.op == "call_function" else None
    if target is None:
        return None
    kwargs, using, autocast = dict(node.kwargs), "", ""
    donate = tuple(target.op.activation_indices if target.donates else ())
    if target.annotated:
        using, autocast = (str(kwargs.pop(name, "")) for name in ("using", "autocast"))
        donate = tuple(cast("Sequence[int]", kwargs.pop("donate", None) or ()))
    values = target.op.bind(*node.args, **kwargs)
    return IrCall(node, target.op, values, call_site(using), donate, autocast)


def annotate(
    call: IrCall, *, using: str = "", donate: Sequence[int] = (), autocast: str = ""
) -> None:
    """Replace the annotations of *call* with the given ones."""
    args, kwargs = call_arguments(call.op, call.values)
    annotations: dict[str, Any] = {"using": using, "donate": list(donate), "autocast": autocast}
    call.node.target = call.op.torch_ops.annotated
    call.node.args = args
    call.node.kwargs = kwargs | {name: value for name, value in annotations.items() if value}


def call_arguments(op: IrOp, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``(args, kwargs)`` for a node that calls *op*, without defaults.

    AOTAutograd normalizes calls in the same way, and Inductor expects it.
    """
    pairs = zip(op.schema.params, values, strict=True)
    changed = [not p.has_default or isinstance(v, Node) or v != p.default for p, v in pairs]
    args, kwargs = op.schema.split(values)
    count = max(
        (i for i, is_changed in enumerate(changed[: len(args)], 1) if is_changed), default=0
    )
    named = {name for name, is_changed in zip(op.schema.names, changed, strict=True) if is_changed}
    return args[:count], {name: value for name, value in kwargs.items() if name in named}


def ir_calls(graph: Graph) -> list[IrCall]:
    """Return the IR calls of *graph* in order, without those of control-flow subgraphs."""
    return [call for node in graph.nodes if (call := ir_call(node))]


def all_calls(graph_module: GraphModule) -> list[IrCall]:
    """Return the IR calls of a graph and of its control-flow subgraphs."""
    return [call for module in all_graphs(graph_module) for call in ir_calls(module.graph)]


def replace(call: IrCall, outputs: Sequence[Node]) -> list[Node]:
    """Replace *call* with *outputs*, and erase it.

    Returns the nodes with new fake values, see :func:`substitute`.
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
    """Replace the uses of *old* with *new*, and update the fake values of its views.

    Alias analysis compares the storages of fake values, so views of *old* must move to the storage
    of *new*. Returns the nodes with new fake values.
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
    """Return a function that turns the fake value of a view of *old* into one of *new*."""
    before, after = (tensors_of(node) for node in (old, new))  # empty for nodes of plugin passes
    if len(before) != 1 or len(after) != 1 or not same_layout(before[0], after[0]):
        return _recompute
    relocation = Relocation(cast("Any", after[0]).fake_mode)
    relocation.put(before[0], after[0])

    def move(node: Node) -> None:
        if not all(map(compat.is_plain_fake, tensors_of(node))):
            _recompute(node)
            return
        with torch.no_grad(), compat.no_modes():
            node.meta["val"] = relocation.move(node.meta["val"])

    return move


def _recompute(node: Node) -> None:
    node.meta["val"] = computed_fake(node, compat.fake_mode_of(tensors_of(node)))


def computed_fake(node: Node, mode: compat.FakeTensorMode | None) -> Any:
    """Return the fake value of *node*, computed from the fake values of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), fake_of)
    with torch.no_grad(), mode or nullcontext():
        return cast("Any", node.target)(*args, **kwargs)


def fake_of(node: Node) -> Any:
    """Return the fake value of *node*.

    Raises:
        KeyError: the node does not have one; see :func:`has_fake`.
    """
    meta = node.meta
    return meta["val"] if "val" in meta else meta["example_value"]


def has_fake(node: Node) -> bool:
    """Return whether *node* has a fake value, from AOTAutograd or Dynamo."""
    return "val" in node.meta or "example_value" in node.meta


def has_fakes(graph: Graph) -> bool:
    """Return whether the inputs of *graph* have fake values."""
    return all(map(has_fake, graph.find_nodes(op="placeholder")))


def all_graphs(graph_module: GraphModule) -> list[GraphModule]:
    """Return *graph_module* and its control-flow subgraphs (cond, while_loop, ...), outer first."""
    subgraphs = named_graphs(graph_module, graph_module.graph.nodes).values()
    return [graph_module, *chain.from_iterable(map(all_graphs, subgraphs))]


def named_graphs(owner: GraphModule | None, nodes: Iterable[Node]) -> dict[str, GraphModule]:
    """Return the subgraphs among *nodes* by their attribute names in *owner*."""
    names = sorted({str(node.target) for node in nodes if node.op == "get_attr"})
    values = {name: getattr(owner, name, None) for name in names}
    return {name: module for name, module in values.items() if isinstance(module, GraphModule)}


def graph_text(graph: Graph) -> str:
    """Return *graph* as Python source."""
    return graph.python_code("self").src


def strip_views(node: Any) -> Any:
    """Return the base of a chain of :data:`VIEWS`."""
    while isinstance(node, Node) and node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]
    return node


def is_op(node: Node) -> bool:
    """Return whether *node* computes a tensor: not a view, a tuple item or a size."""
    skipped = node.op != "call_function" or node.target in VIEWS
    is_size = isinstance(node.meta.get("val"), (int, torch.SymInt))
    return not (skipped or is_size or node.target is operator.getitem)


def uses(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yield (value, reader) for every use of an op's results, through views and tuple items."""
    waiting = [node]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user.op == "call_function" and not is_op(user):
                waiting.append(user)
            else:
                yield value, user


def kind(node: Node) -> object:
    """Return a key for the function that *node* calls; all overloads of an IR op have one key."""
    target = find_target(node.target) if node.op == "call_function" else None
    return target.op if target else (node.op, node.target)


def operands(node: Node) -> list[Any]:
    """Return the arguments of a node in the order of its schema, including defaults."""
    call = ir_call(node)
    if call is not None:
        return list(call.values)
    if isinstance(node.target, compat.OpOverload):
        rest = node.target._schema.arguments[len(node.args) :]
        return [*node.args, *(node.kwargs.get(a.name, a.default_value) for a in rest)]
    return list(node.args)


def source_line(node: Node) -> str:
    """Return the innermost line of user code that created *node*: ``file:line: code``."""
    frames = _FRAME.findall(node.stack_trace or "")
    for excluded in _NOT_IN:
        user_frames = [frame for frame in frames if not frame[0].startswith((*_NEVER, *excluded))]
        if user_frames:
            file, number, code = user_frames[-1]
            return f"{file}:{number}: {code.strip()}" if code else f"{file}:{number}"
    return f"node {node.name} (no source line is known)"


def module_path(node: Node) -> str:
    """Return the path of the innermost module that called *node*, or "" outside modules.

    For example, ``L['self'].model.layers.0.mlp`` becomes ``model.layers.0.mlp``.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return _ROOT.sub("", path.replace("[", ".").replace("]", ""))


def tensors_of(node: Node) -> list[torch.Tensor]:
    """Return the fake tensors of *node*: zero, one or several."""
    value = fake_of(node) if has_fake(node) else ()
    items: Sequence[Any] = value if isinstance(value, (list, tuple)) else (value,)
    return [item for item in items if isinstance(item, torch.Tensor)]


# Facts about a graph that several passes need, computed once per state of the graph.


# Functions that read the metadata of a tensor but not its elements.
_METADATA = {"dim", "getattr", "numel", "size", "storage_offset", "stride"}


class GraphInfo:
    """The nodes of a graph, and facts about them that are computed on first use.

    The facts hold for the state of the graph at creation; :meth:`current` returns those of a later
    state. A pass that needs memory facts while it changes the graph reports its changes with
    :meth:`add`, :meth:`forget` and :meth:`renew`.

    The storage of a node is that of its fake tensor; views of a tensor have the same storage.

    Attributes:
        graph: the graph.
        nodes: its nodes, in order.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = list(graph.nodes)
        self._state = [
            (n, n.name, n.target, n.args, n.kwargs, n.meta.get("val")) for n in self.nodes
        ]
        # By storage key. Holding the tensors keeps their storages alive, and the keys unique.
        self._owned: dict[int, list[Tensor]] = {}

    def current(self) -> GraphInfo:
        """Return the facts about the present state of the graph: these, if it has not changed.

        Comparing identities is enough, because FX replaces args and kwargs instead of mutating
        them.
        """
        new = GraphInfo(self.graph)
        new._owned = self._owned
        is_same = len(new._state) == len(self._state) and all(
            x is y
            for one, other in zip(new._state, self._state, strict=True)
            for x, y in zip(one, other, strict=True)
        )
        return self if is_same else new

    @cached_property
    def text(self) -> str:
        """The graph as Python source."""
        return graph_text(self.graph)

    @cached_property
    def order(self) -> dict[Node, int]:
        """The position of every node."""
        return {node: position for position, node in enumerate(self.nodes)}

    @cached_property
    def calls(self) -> dict[Node, IrCall]:
        """The calls of IR ops, in order, without those of control-flow subgraphs."""
        return {node: call for node in self.nodes if (call := ir_call(node))}

    @cached_property
    def ops(self) -> list[Node]:
        """The nodes that compute a tensor, see :func:`is_op`."""
        return [node for node in self.nodes if is_op(node)]

    @cached_property
    def inputs(self) -> list[Node]:
        """The placeholders."""
        return [node for node in self.nodes if node.op == "placeholder"]

    @cached_property
    def returned(self) -> set[Node]:
        """The outputs of the graph."""
        return {n for node in self.nodes if node.op == "output" for n in node.all_input_nodes}

    @cached_property
    def writes(self) -> list[Node]:
        """The operators that write to an argument."""
        return [node for node in self.nodes if compat.is_mutable(node.target)]

    @cached_property
    def computes(self) -> bool:
        """Whether the graph computes anything."""
        return any(node.op not in ("placeholder", "get_attr", "output") for node in self.nodes)

    @cached_property
    def has_subgraphs(self) -> bool:
        """Whether the graph contains control flow."""
        return bool(named_graphs(self.graph.owning_module, self.nodes))

    @cached_property
    def has_tangents(self) -> bool:
        """Whether the graph is, or contains, the backward pass of a training step."""
        return any(node.name.startswith("tangents_") for node in self.inputs)

    @cached_property
    def _storages(self) -> dict[Node, set[int]]:
        return {node: set(map(_key, tensors_of(node))) for node in self.nodes}

    @cached_property
    def _by_storage(self) -> dict[int, dict[Node, None]]:
        nodes: dict[int, dict[Node, None]] = {}
        for node, keys in self._storages.items():
            for key in keys:
                nodes.setdefault(key, {})[node] = None
        return nodes

    def add(self, node: Node, after: Node) -> None:
        """Add a node at the position of *after*."""
        self.order[node] = self.order[after]
        self._enter(node)

    def forget(self, nodes: Iterable[Node]) -> None:
        """Remove nodes."""
        for node in nodes:
            for key in self._storages.pop(node, ()):
                del self._by_storage[key][node]

    def renew(self, nodes: Iterable[Node]) -> None:
        """Update nodes whose fake values have changed."""
        for node in dict.fromkeys(nodes):
            self.forget([node])
            self._enter(node)

    def own(self, node: Node) -> None:
        """Record that the graph owns the memory of *node*, which the caller donated."""
        for tensor in tensors_of(node):
            self._owned.setdefault(_key(tensor), []).append(tensor)

    def owns(self, node: Node) -> bool:
        """Return whether :meth:`own` recorded all elements of *node*."""
        return all(
            any(covers(owned, tensor) for owned in self._owned.get(_key(tensor), ()))
            for tensor in tensors_of(node)
        )

    def sharing(self, node: Node, *, certainly: bool = False) -> list[Node]:
        """Return the nodes that may share elements with *node*, including itself.

        With *certainly*, return only the nodes that provably share some.
        """
        share = coincide if certainly else share_elements
        keys = map(_key, tensors_of(node))
        others = dict.fromkeys(other for key in keys for other in self._by_storage.get(key, ()))
        return list(dict.fromkeys([node, *(other for other in others if _any(share, node, other))]))

    def readers_after(self, node: Node, position: Node, *, certainly: bool = False) -> list[Node]:
        """Return the nodes that read the memory of *node*, through any alias, after *position*.

        With *certainly*, return only the nodes that provably read some of its elements. Creating a
        view or reading a size is not a read.
        """
        limit = self.order[position]
        aliases = self.sharing(node, certainly=certainly)
        readers = [user for alias in aliases for user in alias.users]
        late = {u: None for u in readers if u is not position and self.order.get(u, -1) > limit}
        reading = [u for u in late if not self._reads_nothing(u, node)]
        return sorted(reading, key=self.order.__getitem__)

    def _reads_nothing(self, user: Node, node: Node) -> bool:
        results = tensors_of(user)
        if not results:
            return compat.function_name(user) in _METADATA
        in_place = all(_key(tensor) in self._storages[node] for tensor in results)
        return in_place and compat.makes_views(user)

    def _enter(self, node: Node) -> None:
        keys = set(map(_key, tensors_of(node)))
        for key in keys:
            self._by_storage.setdefault(key, {})[node] = None
        self._storages[node] = keys


def overlap(a: Node, b: Node) -> bool:
    """Return whether two nodes may share elements."""
    return _any(share_elements, a, b)


def _any(test: Callable[[Tensor, Tensor], bool], a: Node, b: Node) -> bool:
    return any(test(s, t) for s, t in product(tensors_of(a), tensors_of(b)))


def _key(tensor: Tensor) -> int:
    return compat.storage_key(tensor) or 0
