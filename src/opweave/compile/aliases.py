"""Which nodes of a graph share memory, and who reads it when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from opweave.compile import compat
from opweave.compile.nodes import tensors_of
from opweave.ir import memory
from opweave.ir.memory import covers, disjoint

# Functions of a tensor's metadata; they read none of its elements.
_METADATA = {"dim", "getattr", "numel", "size", "storage_offset", "stride"}


class Aliases:
    """The nodes of *graph* by storage, and their order, as they are now.

    Storages are those of the fake tensors that the tracer noted: views of one tensor have one
    storage. Nodes that are added later must be entered with :meth:`add`.
    """

    def __init__(self, graph: Graph) -> None:
        self.order: dict[Node, int] = {}
        self.renumber(graph)
        self._by_storage: dict[int, dict[Node, None]] = {}
        self._storages: dict[Node, set[int]] = {}
        # By storage; as long as they live, no other storage has their keys.
        self._owned: dict[int, list[Tensor]] = {}
        for node in graph.nodes:
            self._enter(node)

    def renumber(self, graph: Graph) -> None:
        """Note the order of the nodes as it is now."""
        self.order = {node: position for position, node in enumerate(graph.nodes)}

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

    def sharing(self, node: Node, *, certainly: bool = False) -> list[Node]:
        """Return the nodes that may share elements with *node*, itself included.

        With *certainly*, only those that are known to share some.
        """
        share = coincide if certainly else share_elements
        found: dict[Node, None] = {node: None}
        for tensor in tensors_of(node):
            for other in self._by_storage.get(_key(tensor), ()):
                if _any(share, node, other):
                    found[other] = None
        return list(found)

    def readers_after(self, node: Node, position: Node, *, certainly: bool = False) -> list[Node]:
        """Return the nodes that use the memory of *node*, under any name, after *position*.

        With *certainly*, only those that are known to use some of its elements. Making a view, or
        asking for a size, uses none.
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
        self._storages[node] = set(map(_key, tensors_of(node)))
        for key in self._storages[node]:
            self._by_storage.setdefault(key, {})[node] = None


def overlap(a: Node, b: Node) -> bool:
    """Whether two nodes may share elements: they have one storage and are not provably apart."""
    return _any(share_elements, a, b)


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, real or fake, may share elements."""
    key = compat.storage_key(a)
    if key is None or key != compat.storage_key(b):
        return False
    # Where a transform's elements lie, its strides don't say.
    return a is b or compat.is_wrapped(a) or compat.is_wrapped(b) or not disjoint(a, b)


def overlaps_another(inputs: Sequence[object], positions: Iterable[int]) -> bool:
    """Whether a tensor at one of *positions* may share elements with another of *inputs*."""
    return any(
        other != position and isinstance(value, Tensor) and share_elements(given, value)
        for position in positions
        for given in (inputs[position],)
        if isinstance(given, Tensor)
        for other, value in enumerate(inputs)
    )


def note_writes(inputs: Sequence[Any], positions: Iterable[int]) -> None:
    """Let a backward pass that has saved a donated input raise torch's error."""
    if torch.is_inference_mode_enabled():
        return
    written = [inputs[position] for position in positions]
    # What requires a gradient is not reused.
    torch.autograd.graph.increment_version([t for t in written if not t.requires_grad])


def coincide(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, real or fake, are known to share elements."""
    key = compat.storage_key(a)
    if key is None or key != compat.storage_key(b):
        return False
    wrapped = compat.is_wrapped(a) or compat.is_wrapped(b)
    return a is b or (not wrapped and memory.coincide(a, b))


def _any(test: Callable[[Tensor, Tensor], bool], a: Node, b: Node) -> bool:
    return any(test(s, t) for s, t in product(tensors_of(a), tensors_of(b)))


def _key(tensor: Tensor) -> int:
    return compat.storage_key(tensor) or 0
