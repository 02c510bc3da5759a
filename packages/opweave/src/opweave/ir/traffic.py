"""Lower bound of the memory traffic of a call, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from opweave.base import compat

if TYPE_CHECKING:
    from opweave.ir.op import IrOp

_TABLES = frozenset({"embedding", "masked_embedding"})


def least_bytes(op: IrOp, values: Sequence[Any], results: Iterable[Any]) -> int | None:
    """Return the total size in bytes of the tensor arguments and results of a call.

    Args:
        op: the op.
        values: one value per parameter of *op*; symbolic sizes count as their hints.
        results: the outputs of the call.

    Returns:
        The number of bytes, or None for data-dependent sizes and for ops that read only a part of
        an argument, such as an embedding table or a KV cache.
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
