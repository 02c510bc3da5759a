"""Alias analysis: which nodes of a graph share memory, and which nodes read it later."""

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

# Functions that read the metadata of a tensor but not its elements.
_METADATA = {"dim", "getattr", "numel", "size", "storage_offset", "stride"}


class Aliases:
    """The nodes of *graph* by storage, and their order.

    The storage of a node is that of its fake tensor; views of a tensor have the same storage. New
    nodes must be added with :meth:`add`.
    """

    def __init__(self, graph: Graph) -> None:
        self.order: dict[Node, int] = {}
        self.renumber(graph)
        self._by_storage: dict[int, dict[Node, None]] = {}
        self._storages: dict[Node, set[int]] = {}
        # By storage key. Holding the tensors keeps their storages alive, and the keys unique.
        self._owned: dict[int, list[Tensor]] = {}
        for node in graph.nodes:
            self._enter(node)

    def renumber(self, graph: Graph) -> None:
        """Update the order of the nodes."""
        self.order = {node: position for position, node in enumerate(graph.nodes)}

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
        self._storages[node] = set(map(_key, tensors_of(node)))
        for key in self._storages[node]:
            self._by_storage.setdefault(key, {})[node] = None


def overlap(a: Node, b: Node) -> bool:
    """Return whether two nodes may share elements."""
    return _any(share_elements, a, b)


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors, real or fake, may share elements."""
    return _same_storage(a, b) and (a is b or _is_wrapped(a, b) or not disjoint(a, b))


def coincide(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors, real or fake, provably share elements."""
    return _same_storage(a, b) and (a is b or (not _is_wrapped(a, b) and memory.coincide(a, b)))


def overlaps_another(inputs: Sequence[object], positions: Iterable[int]) -> bool:
    """Return whether a tensor at one of *positions* may share elements with another input."""
    return any(
        other != position and isinstance(value, Tensor) and share_elements(given, value)
        for position in positions
        for given in (inputs[position],)
        if isinstance(given, Tensor)
        for other, value in enumerate(inputs)
    )


def note_writes(inputs: Sequence[Any], positions: Iterable[int]) -> None:
    """Bump the version counters of donated inputs.

    A backward pass that has saved one of them then raises torch's error instead of returning a
    wrong gradient.
    """
    if torch.is_inference_mode_enabled():
        return
    written = [inputs[position] for position in positions]
    # The memory of tensors that require a gradient is never reused.
    torch.autograd.graph.increment_version([t for t in written if not t.requires_grad])


def _same_storage(a: Tensor, b: Tensor) -> bool:
    key = compat.storage_key(a)
    return key is not None and key == compat.storage_key(b)


def _is_wrapped(a: Tensor, b: Tensor) -> bool:
    """Return whether a functorch transform wraps a tensor, whose strides then say nothing."""
    return compat.is_wrapped(a) or compat.is_wrapped(b)


def _any(test: Callable[[Tensor, Tensor], bool], a: Node, b: Node) -> bool:
    return any(test(s, t) for s, t in product(tensors_of(a), tensors_of(b)))


def _key(tensor: Tensor) -> int:
    return compat.storage_key(tensor) or 0
