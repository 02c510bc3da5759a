"""Snapshots of the memory of arguments, and comparisons of bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from opweave.ir.calls import Values as Values
from opweave.ir.calls import cloned, raw
from opweave.ir.calls import copied as copied
from opweave.ir.calls import fake_values as fake_values
from opweave.ir.op import tensors_in


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits in the same shape: NaN is itself, 0 is not -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in the same memory, from the first to the last element of each."""
    (start, end), (other_start, other_end) = _span(a), _span(b)
    return a.device == b.device and start < other_end and other_start < end


def _span(t: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of *t* and of that behind its last."""
    steps = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + ((steps + 1) * t.element_size() if t.numel() else 0)


class Snapshot:
    """A snapshot of the storages of arguments."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.tensors = tensors_in(values)
        self._before = [raw(t.untyped_storage()).clone() for t in self.tensors]

    def changed(self, *, except_in: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the tensors whose storages have changed.

        The elements of *except_in* are ignored, but not the gaps between them.
        """
        changed = []
        for tensor, before in zip(self.tensors, self._before, strict=True):
            now = tensor.untyped_storage()
            after = cloned(now)
            for free in except_in:
                if free.untyped_storage().data_ptr() == now.data_ptr():
                    _restore(after, before.untyped_storage(), free)
            if not torch.equal(raw(after), before):
                changed.append(tensor)
        return changed


def _restore(storage: UntypedStorage, before: UntypedStorage, where: Tensor) -> None:
    """Put what was in the elements of *where* back into *storage*."""
    after, old = (
        torch.empty(0, dtype=where.dtype, device=where.device).set_(s) for s in (storage, before)
    )
    places = torch.arange(after.numel(), device=where.device)
    used = places.as_strided(where.shape, where.stride(), where.storage_offset()).reshape(-1)
    after[used] = old[used]
