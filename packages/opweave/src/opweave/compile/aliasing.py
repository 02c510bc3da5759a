"""Aliases of tensors: whether two share memory, and fake tensors in other storages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

from opweave.compile import compat
from opweave.ir import donation
from opweave.ir.donation import disjoint

# Alias analysis of tensors: whether two of them share memory.


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors, real or fake, may share elements."""
    return _same_storage(a, b) and (a is b or _is_wrapped(a, b) or not disjoint(a, b))


def coincide(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors, real or fake, provably share elements."""
    return _same_storage(a, b) and (a is b or (not _is_wrapped(a, b) and donation.coincide(a, b)))


def overlaps_another(inputs: Sequence[object], positions: Iterable[int]) -> bool:
    """Return whether a tensor at one of *positions* may share elements with another input."""
    return any(
        other != position and isinstance(value, Tensor) and share_elements(donated, value)
        for position in positions
        for donated in (inputs[position],)
        if isinstance(donated, Tensor)
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


# Move fake tensors into other storages, for copies of a graph.
#
# All copies of a graph have fake values of the same sizes, strides and dtypes, but in storages
# of their own, because alias analysis compares storages. Moving the values is much faster than
# running the operators' shape functions, which take about a millisecond per node with dynamic
# sizes.


class Relocation:
    """A mapping from the storages of fake tensors to new storages, whose tensors are of *mode*."""

    def __init__(self, mode: compat.FakeTensorMode) -> None:
        self._mode = mode
        # By storage key: the new storage, and the number of bytes by which offsets in it shift.
        self._places: dict[int | None, tuple[torch.UntypedStorage, int | SymInt]] = {}

    def put(self, original: Tensor, there: Tensor) -> None:
        """Map the storage of *original* to that of *there*, so that *original* moves to *there*."""
        before, after = original.storage_offset(), there.storage_offset()
        shift = (after - before) * original.element_size() if after is not before else 0
        self._places[compat.storage_key(original)] = there.untyped_storage(), shift

    def put_in_new_memory(self, value: object) -> None:
        """Map the storages of the tensors in *value* that are not mapped yet to new storages."""
        for tensor in nested_tensors(value):
            key = compat.storage_key(tensor)
            if key not in self._places:
                size = tensor.untyped_storage().nbytes()
                self._places[key] = compat.new_fake_storage(size), 0

    def move(self, value: Any) -> Any:
        """Return *value* with the tensors whose storages are mapped moved to the new ones."""
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
    """Return whether a :class:`Relocation` can move *values*, computed from *inputs*.

    It can move plain fake tensors without new data-dependent sizes, whose symbols are different in
    every copy.
    """
    tensors = [tensor for value in values for tensor in nested_tensors(value)]
    new = compat.data_dependent(values) - compat.data_dependent(inputs)
    return not new and all(map(compat.is_plain_fake, tensors))


def same_layout(a: object, b: object) -> bool:
    """Return whether two plain fake tensors are equal except for storage and offset."""
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and compat.is_plain_fake(a)
        and compat.is_plain_fake(b)
        and (a.dtype, a.device) == (b.dtype, b.device)
        and expressions(a) == expressions(b)
    )


def expressions(tensor: Tensor) -> tuple[Any, ...]:
    """Return the sizes and strides, dynamic ones as expressions, which compare without guards."""
    return tuple(map(expression, (*tensor.shape, *tensor.stride())))


def nested_tensors(value: object) -> Iterable[Tensor]:
    """Return the tensors in *value*, at any depth."""
    if isinstance(value, Tensor):  # much faster than flattening
        return (value,)
    return (leaf for leaf in compat.leaves(value) if isinstance(leaf, Tensor))


def expression(value: Any) -> Any:
    """Return a symbolic number as its expression, and any other value unchanged.

    Comparing symbolic numbers would add guards.
    """
    return value.node.expr if isinstance(value, (SymInt, SymFloat)) else value
