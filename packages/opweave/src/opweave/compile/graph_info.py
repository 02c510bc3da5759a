"""Facts about a graph that several passes need, computed once per state of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import product

from torch import Tensor
from torch.fx import Graph, Node

from opweave.compile import compat
from opweave.compile.aliases import coincide, share_elements
from opweave.compile.nodes import IrCall, graph_text, ir_call, is_op, named_graphs, tensors_of
from opweave.ir.memory import covers

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
        found: dict[int, dict[Node, None]] = {}
        for node, keys in self._storages.items():
            for key in keys:
                found.setdefault(key, {})[node] = None
        return found

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
        found: dict[Node, None] = {node: None}
        for tensor in tensors_of(node):
            for other in self._by_storage.get(_key(tensor), ()):
                if _any(share, node, other):
                    found[other] = None
        return list(found)

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
        made = tensors_of(user)
        if not made:
            return compat.function_name(user) in _METADATA
        in_place = all(_key(tensor) in self._storages[node] for tensor in made)
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
