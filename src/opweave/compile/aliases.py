"""Which nodes of a graph share memory, and who reads it when."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from torch import Tensor
from torch.fx import Graph, Node

from opweave.compile import compat
from opweave.compile.nodes import tensors_of
from opweave.ir.donation import apart, covers


class Aliases:
    """The nodes of *graph* by storage, and their order, as they are now.

    Storages are those of the fake tensors that the tracer noted: views of one tensor have one
    storage. Nodes that are added later must be entered with :meth:`add`.
    """

    def __init__(self, graph: Graph) -> None:
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        self._by_storage: dict[int, dict[Node, None]] = {}
        self._storages: dict[Node, set[int]] = {}
        # By storage; as long as they live, no other storage has their keys.
        self._owned: dict[int, list[Tensor]] = {}
        for node in graph.nodes:
            self._enter(node)

    def add(self, node: Node, after: Node) -> None:
        """Enter a node that now stands where *after* stands."""
        self.order[node] = self.order[after]
        self._enter(node)

    def forget(self, nodes: Iterable[Node]) -> None:
        """Note that nodes are gone."""
        for node in nodes:
            for key in self._storages.pop(node, ()):
                del self._by_storage[key][node]

    def renew(self, nodes: Iterable[Node]) -> None:
        """Read the storages of nodes anew: they are views of something else now."""
        for node in dict.fromkeys(nodes):
            self.forget([node])
            self._enter(node)

    def own(self, node: Node) -> None:
        """Note that the memory of *node* is the graph's own, even if it came from the caller."""
        for tensor in tensors_of(node):
            self._owned.setdefault(_key(tensor), []).append(tensor)

    def owns(self, node: Node) -> bool:
        """Whether :meth:`own` was told so of all elements of *node*."""
        return all(
            any(covers(owned, tensor) for owned in self._owned.get(_key(tensor), ()))
            for tensor in tensors_of(node)
        )

    def sharing(self, node: Node) -> list[Node]:
        """Return the nodes that may share elements with *node*, itself included."""
        found: dict[Node, None] = {node: None}
        for tensor in tensors_of(node):
            for other in self._by_storage.get(_key(tensor), ()):
                if overlap(node, other):
                    found[other] = None
        return list(found)

    def readers_after(self, node: Node, position: Node) -> list[Node]:
        """Return who uses the memory of *node*, under whatever name, after *position*."""
        limit = self.order[position]
        readers = [user for alias in self.sharing(node) for user in alias.users]
        late = {u: None for u in readers if u is not position and self.order.get(u, -1) > limit}
        reading = [u for u in late if not self._views_elsewhere(u, node)]
        return sorted(reading, key=self.order.__getitem__)

    def _views_elsewhere(self, reader: Node, node: Node) -> bool:
        """Whether *reader* makes nothing but views, of memory beside that of *node*."""
        made = tensors_of(reader)
        is_view = bool(made) and all(_key(tensor) in self._storages[node] for tensor in made)
        return is_view and not overlap(reader, node)

    def _enter(self, node: Node) -> None:
        self._storages[node] = set(map(_key, tensors_of(node)))
        for key in self._storages[node]:
            self._by_storage.setdefault(key, {})[node] = None


def overlap(a: Node, b: Node) -> bool:
    """Whether two nodes may share elements: they have one storage and are not provably apart."""
    return any(share_elements(s, t) for s, t in product(tensors_of(a), tensors_of(b)))


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, real or fake, may share elements."""
    key = compat.storage_key(a)
    if key is None or key != compat.storage_key(b):
        return False
    # Where a transform's elements lie, its strides don't say.
    return a is b or compat.is_wrapped(a) or compat.is_wrapped(b) or not apart(a, b)


def _key(tensor: Tensor) -> int:
    return compat.storage_key(tensor) or 0
