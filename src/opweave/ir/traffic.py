"""Bytes of memory that a call of an op reads and writes at least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from opweave.base import compat

if TYPE_CHECKING:
    from opweave.ir.op import IrOp

_TABLES = frozenset({"embedding", "masked_embedding"})


def least_bytes(op: IrOp, values: Sequence[Any], results: Iterable[Any]) -> int | None:
    """Return the bytes of all tensor arguments and results of a call.

    Args:
        values: one value per parameter of *op*; fake tensors with symbolic sizes count as the sizes
            they were traced with.
        results: what the call returns.

    Returns:
        None for ops that read a part of an argument that their other arguments decide, such as
        embedding tables and KV caches, and for sizes that depend on data.
    """
    if op.name in _TABLES or any("cache" in name for name in op.schema.names):
        return None
    sizes = [_bytes(each) for each in (*_flat(values), *_flat(results))]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _flat(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _flat(value)
    return found


def _bytes(tensor: Tensor) -> int | None:
    count = compat.size_hint(tensor.numel())
    return None if count is None else count * tensor.element_size()
