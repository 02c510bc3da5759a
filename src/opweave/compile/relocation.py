"""Fake tensors in other memory: what a copy of a graph has in place of those of the original.

All copies have the same sizes, strides and dtypes. Only whose memory a tensor is in must be each
copy's own, because storages tell views from copies. So nothing is computed again: the operators'
shape functions take about a millisecond for each node where sizes vary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

from opweave.compile import compat

Place = tuple[torch.UntypedStorage, int | SymInt]  # memory, and the bytes that come first in it


class Relocation:
    """Where the memory of fake tensors is in another place, of *mode*."""

    def __init__(self, mode: compat.FakeTensorMode) -> None:
        self._mode = mode
        self._places: dict[int | None, Place] = {}

    def put(self, original: Tensor, there: Tensor) -> None:
        """Say that *original* and its views are, in the other place, *there* and its views."""
        before, after = original.storage_offset(), there.storage_offset()
        shift = (after - before) * original.element_size() if after is not before else 0
        self._places[compat.storage_key(original)] = there.untyped_storage(), shift

    def put_anew(self, value: object) -> None:
        """Give those tensors in *value* new memory whose memory was not put anywhere yet."""
        for tensor in nested_tensors(value):
            key = compat.storage_key(tensor)
            if key not in self._places:
                size = tensor.untyped_storage().nbytes()
                self._places[key] = compat.new_fake_storage(size), 0

    def move(self, value: Any) -> Any:
        """Return *value* with all tensors whose memory was put somewhere as they are there."""
        if isinstance(value, Tensor):
            return self._moved(value)
        return compat.map_tensors(self._moved, value)

    def _moved(self, tensor: Tensor) -> Tensor:
        place = self._places.get(compat.storage_key(tensor))
        if place is None:
            return tensor
        storage, shift = place
        offset = tensor.storage_offset()
        if not isinstance(shift, int) or shift:
            offset = offset + shift // tensor.element_size()
        return compat.fake_in(self._mode, storage, tensor, offset)


def are_movable(values: Sequence[object], inputs: Sequence[object]) -> bool:
    """Whether a :class:`Relocation` can move *values*, computed from *inputs*, for any copy.

    It can move ordinary fake tensors. Sizes that only running the graph tells are each copy's own.
    """
    tensors = [tensor for value in values for tensor in nested_tensors(value)]
    new = compat.data_dependent(values) - compat.data_dependent(inputs)
    return not new and all(map(compat.is_plain_fake, tensors))


def same_layout(a: object, b: object) -> bool:
    """Whether two fake tensors differ at most in where they are."""
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and compat.is_plain_fake(a)
        and compat.is_plain_fake(b)
        and (a.dtype, a.device) == (b.dtype, b.device)
        and expressions(a) == expressions(b)
    )


def expressions(tensor: Tensor) -> tuple[Any, ...]:
    """Return sizes and strides, those that vary as their expressions: comparing adds no guard."""
    return tuple(map(_expression, (*tensor.shape, *tensor.stride())))


def nested_tensors(value: object) -> Iterable[Tensor]:
    """Return the tensors in *value*, however deep."""
    if isinstance(value, Tensor):
        return (value,)
    return (leaf for leaf in compat.leaves(value) if isinstance(leaf, Tensor))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, SymInt) else size
