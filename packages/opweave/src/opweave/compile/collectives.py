"""Functional collectives in graphs, and their process groups."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import distributed
from torch.fx import Graph, Node

from opweave.compile import compat, fingerprint

_NAMESPACE = "_c10d_functional"
_SUFFIX = re.compile(r"(_tensor|_into_tensor)$")  # reduce_scatter_tensor, all_gather_into_tensor
WAIT = "wait_tensor"


@dataclass(frozen=True)
class Group:
    """A process group, seen from this process.

    Attributes:
        name: its name in graphs.
        size: the number of ranks.
        rank: the rank of this process.
    """

    name: Any
    size: int
    rank: int


def find_group(name: Any) -> Group | None:
    """Return the process group *name*, or None if it does not exist or excludes this process."""
    try:
        group = cast("Any", distributed.distributed_c10d)._resolve_process_group(name)
    except (RuntimeError, ValueError, LookupError):
        return None
    rank = distributed.get_rank(group)
    return Group(name, distributed.get_world_size(group), rank) if rank >= 0 else None


def collective(node: Node) -> str:
    """Return the functional collective that *node* calls, or an empty string.

    ``reduce_scatter_tensor`` and ``all_gather_into_tensor`` are called ``reduce_scatter`` and
    ``all_gather``; the wait is ``wait_tensor``.
    """
    target = node.target
    if not isinstance(target, compat.OpOverload) or target.namespace != _NAMESPACE:
        return ""
    name = str(target).split(".")[1]
    return name if name == WAIT else _SUFFIX.sub("", name)


def count_collectives(graph: Graph) -> dict[str, int]:
    """Return the number of collectives in *graph* by name, without waits."""
    names = Counter(filter(None, map(collective, graph.nodes)))
    del names[WAIT]
    return dict(sorted(names.items()))


def overload(name: str) -> Any:
    """Return the op ``torch.ops._c10d_functional.<name>``."""
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _groups() -> str:
    """Return every group, its size and this process's rank, which a graph may be specialized to."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    return repr(
        sorted(
            (str(name), distributed.get_world_size(group), distributed.get_rank(group))
            for group, name in compat.process_groups().items()
        )
    )


fingerprint.contribute(_groups)
