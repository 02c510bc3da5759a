"""Donation: after ``op.maybe_inplace(...)`` the activations belong to the op.

Reading a donated tensor is undefined behaviour, which eager mode would hide whenever the chosen
kernel does not reuse the memory. In check mode (``OPWEAVE_CHECK_DONATION=1``) it shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opweave.ir import compat
from opweave.ir.compat import decided
from opweave.ir.selection import tensors_in

if TYPE_CHECKING:
    from opweave.ir.op import IrOp

Test = Callable[..., bool]


def overlapping(op: IrOp, *args: Any, **kwargs: Any) -> bool:
    """Whether an activation shares elements with itself or another argument: no reuse then.

    Query and key as slices of one tensor share its storage, but no element; that is told apart for
    tensors that are made of rows with one distance, one for each token or for each head. Other
    views of one storage count as sharing.
    """
    named = list(zip(op.schema.names, op.bind(*args, **kwargs), strict=True))
    activations = tensors_in([value for name, value in named if name in op.activations])
    others = tensors_in([value for name, value in named if name not in op.activations])
    pairs = [*combinations(activations, 2), *((a, b) for a in activations for b in others)]
    return any(map(overlaps_itself, activations)) or any(
        compat.share_storage(a, b) and not apart(a, b) for a, b in pairs
    )


def poison_unused(op: IrOp, values: tuple[Any, ...], result: Any) -> None:
    """Overwrite every donated tensor whose storage no output and no other argument uses."""
    named = list(zip(op.schema.names, values, strict=True))
    kept = [*tensors_in((result,)), *tensors_in([v for n, v in named if n not in op.activations])]
    for tensor in tensors_in([v for n, v in named if n in op.activations]):
        if not any(compat.share_storage(tensor, other) for other in kept):
            _poison(tensor)


def _if_known(otherwise: bool) -> Callable[[Test], Test]:
    """Let a function answer *otherwise* where sizes decide that only the data will tell."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def ask(*tensors: Tensor) -> bool:
            try:
                return test(*tensors)
            except Exception as error:
                if not compat.depends_on_data(error):
                    raise
                return otherwise

        return ask

    return decorate


@_if_known(otherwise=True)
def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two indices of a tensor may lead to one element, as in an expanded one."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if decided(size > 1, otherwise=True) and decided(stride < extent, otherwise=True):
            return decided(tensor.numel() > 0, otherwise=True)
        extent += stride * (size - 1)
    return False


@_if_known(otherwise=False)
def apart(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one storage are rows that do not touch each other."""
    if decided(a.numel() == 0, otherwise=False) or decided(b.numel() == 0, otherwise=False):
        return True
    if a.element_size() != b.element_size():
        return False  # offsets count elements
    (a_rows, a_width), (b_rows, b_width) = _rows(a), _rows(b)
    start_a, start_b = a.storage_offset(), b.storage_offset()
    if a_rows or b_rows:
        if len(a_rows) != 1 or a_rows != b_rows:
            return False
        ((_, distance),) = a_rows
        if distance == 0:
            return False
        start_a, start_b = start_a % distance, start_b % distance
        if start_a + a_width > distance or start_b + b_width > distance:
            return False  # a row reaches into where the next begins
    return start_a + a_width <= start_b or start_b + b_width <= start_a


@_if_known(otherwise=False)
def covers(a: Tensor, b: Tensor) -> bool:
    """Whether every element of *b* is known to be one of *a*, a view of the same storage."""
    if a.element_size() != b.element_size():
        return False
    (a_rows, a_width), (b_rows, b_width) = _rows(a), _rows(b)
    if a_rows and a_rows != b_rows:
        return False
    reach = sum((size - 1) * stride for size, stride in b_rows) if not a_rows else 0
    start_a, start_b = a.storage_offset(), b.storage_offset()
    return start_a <= start_b and start_b + reach + b_width <= start_a + a_width


def _rows(tensor: Tensor) -> tuple[list[tuple[int, int]], int]:
    """Return the dimensions that lead to a contiguous row, as (size, stride), and its width.

    Dimensions that count the same rows, such as tokens and heads, are one.
    """
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    dims = [(n, stride) for n, stride in sizes if decided(n != 1, otherwise=True)]
    width = 1
    while dims and dims[-1][1] == width:
        width *= dims.pop()[0]
    rows: list[tuple[int, int]] = []
    for size, stride in dims:
        outer = rows.pop()[0] if rows and rows[-1][1] == size * stride else 1
        rows.append((outer * size, stride))
    return rows, width


def _poison(tensor: Tensor) -> None:
    with torch.inference_mode():  # takes tensors that were made there, and any other
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
