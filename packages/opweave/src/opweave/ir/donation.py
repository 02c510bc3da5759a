"""Donation of activations, and the overlap of strided tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opweave import torch_compat
from opweave.ir.op import OpDefinition, tensors_in
from opweave.torch_compat import decided, is_certain

# Overlap analysis of strided tensors in one storage, from sizes, strides and offsets.
#
# A tensor occupies a set of places: the sums of one multiple of each stride. Take two such sets
# and a step so that every stride is either a multiple of the step, or so short that its
# multiples stay within one step. Each place is then a row (its quotient by the step) and a
# column (the remainder), and both sets are products of rows and columns. They share a place if
# and only if they share a row and a column. Rows and columns are sets of the same kind with
# fewer or shorter strides, so the analysis recurses. The order of the dimensions does not
# matter.
#
# Sizes may be symbolic. Answers that depend on data count as unknown.


Dims = list[tuple[int, int]]  # (size, stride)
Question = Callable[..., bool]


def _if_known(otherwise: bool) -> Callable[[Question], Question]:
    """Make a function return *otherwise* if the answer depends on data-dependent sizes."""

    def decorate(function: Question) -> Question:
        @functools.wraps(function)
        def call(*tensors: Tensor) -> bool:
            try:
                return function(*tensors)
            except Exception as error:
                if not torch_compat.depends_on_data(error):
                    raise
                return otherwise

        return call

    return decorate


@_if_known(otherwise=True)
def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two indices of a tensor may refer to the same element, as in an expanded tensor."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if decided(size > 1, otherwise=True) and decided(stride < extent, otherwise=True):
            return decided(tensor.numel() > 0, otherwise=True)
        extent += stride * (size - 1)
    return False


@_if_known(otherwise=False)
def disjoint(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one storage are known to share no element."""
    return _meet(a, b) is False


@_if_known(otherwise=False)
def coincide(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one storage are known to share an element."""
    return _meet(a, b) is True


@_if_known(otherwise=False)
def covers(a: Tensor, b: Tensor) -> bool:
    """Whether every element of *b* is known to be one of *a*, a view of the same storage."""
    if is_certain(a.numel() == 0) or is_certain(b.numel() == 0):
        return is_certain(b.numel() == 0)
    (a_dims, a_start), (b_dims, b_start) = _places(a, b)
    return _contains(a_dims, b_dims, b_start - a_start)


def empty_in_layout(tensor: Tensor) -> Tensor:
    """Return an empty tensor with the strides of *tensor*, gaps included.

    Unlike ``torch.empty_like``, which drops gaps. Contiguous if *tensor* overlaps itself.
    """
    if tensor.is_contiguous() or overlaps_itself(tensor):
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    size, strides = tensor.shape, tensor.stride()
    return torch.empty_strided(size, strides, dtype=tensor.dtype, device=tensor.device)


def clone_in_layout(tensor: Tensor) -> Tensor:
    """Return a copy with the layout of :func:`empty_in_layout`; ``clone()`` drops gaps."""
    return empty_in_layout(tensor).copy_(tensor)


def _meet(a: Tensor, b: Tensor) -> bool | None:
    """Return whether two views of one storage share an element, or None if unknown."""
    if is_certain(a.numel() == 0) or is_certain(b.numel() == 0):
        return False
    (a_dims, a_start), (b_dims, b_start) = _places(a, b)
    return _share(a_dims, b_dims, b_start - a_start)


def _places(a: Tensor, b: Tensor) -> tuple[tuple[Dims, int], tuple[Dims, int]]:
    """Return the dimensions and offset of both tensors, in elements, or bytes if those differ."""
    in_bytes = a.element_size() != b.element_size()
    return _in_units(a, in_bytes), _in_units(b, in_bytes)


def _in_units(tensor: Tensor, in_bytes: bool) -> tuple[Dims, int]:
    width: int = tensor.element_size() if in_bytes else 1
    start: Any = tensor.storage_offset()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    dims = [(size, stride * width) for size, stride in pairs if not is_certain(size == 1)]
    return [*dims, *([(width, 1)] if width > 1 else [])], start * width


def _share(a: Dims, b: Dims, shift: int) -> bool | None:
    """Return whether two sets share a place, or None if unknown; *b* starts *shift* after *a*."""
    if is_certain(shift < 0):
        a, b, shift = b, a, -shift
    a_reach, b_reach = _reach(a), _reach(b)
    if is_certain(a_reach < shift):
        return False
    # The first place of b lies in a gapless a, or the last place of a lies in a gapless b.
    if is_certain(shift == 0) or (
        _is_unbroken(a) and is_certain(shift > 0) and is_certain(shift <= a_reach)
    ):
        return True
    if _is_unbroken(b) and is_certain(shift <= a_reach) and is_certain(a_reach <= shift + b_reach):
        return True
    for rows, columns, place in _splits(a, b, shift):
        shared = _share(*columns, place[1])
        if shared is False:
            return False
        return _share(*rows, place[0]) and shared
    return None


def _contains(a: Dims, b: Dims, shift: int) -> bool:
    """Whether *a* is known to contain *b*, which starts *shift* places after it."""
    if not is_certain(shift >= 0):
        return False
    if _is_unbroken(a):
        return is_certain(shift + _reach(b) <= _reach(a))
    for rows, columns, place in _splits(a, b, shift):
        return _contains(*columns, place[1]) and _contains(*rows, place[0])
    return False


def _splits(
    a: Dims, b: Dims, shift: int
) -> Iterator[tuple[tuple[Dims, Dims], tuple[Dims, Dims], tuple[int, int]]]:
    """Yield both sets as rows and columns, and the row and column where *b* starts.

    All splits give the same answer, so callers use the first.
    """
    for _, step in [*a, *b]:
        if not is_certain(step > 1):
            continue
        (a_rows, a_columns), (b_rows, b_columns) = (_split(dims, step) for dims in (a, b))
        row, column = shift // step, shift % step
        fits = is_certain(_reach(a_columns) < step) and is_certain(
            column + _reach(b_columns) < step
        )
        if fits and (a_rows or b_rows):
            yield (a_rows, b_rows), (a_columns, b_columns), (row, column)


def _split(dims: Dims, step: int) -> tuple[Dims, Dims]:
    rows, columns = [], []
    for size, stride in dims:
        if is_certain(stride % step == 0):  # adds no guard for divisibility
            rows.append((size, stride // step))
        else:
            columns.append((size, stride))
    return rows, columns


def _reach(dims: Dims) -> int:
    """Return the distance between the first and the last place."""
    return sum((size - 1) * stride for size, stride in dims)


def _is_unbroken(dims: Dims) -> bool:
    """Whether a set is known to have no gaps."""
    width, left = 1, list(dims)
    while left:
        index = next((i for i, (_, stride) in enumerate(left) if is_certain(stride <= width)), None)
        if index is None:
            return False
        size, stride = left.pop(index)  # list.remove would compare sizes and add guards
        width += (size - 1) * stride
    return True


# Donation: after ``op.maybe_inplace(...)`` the activations belong to the op.
#
# Reading a donated tensor is undefined behavior. Eager mode hides it if the chosen kernel does
# not reuse the memory; ``OPWEAVE_CHECK_DONATION=1`` exposes it by overwriting the tensor.


def refused(op: OpDefinition, values: Sequence[Any]) -> tuple[str, ...]:
    """Return the activations that a kernel must not overwrite, by the same rules as the compiler.

    An activation is refused if its elements overlap each other or another argument (disjoint
    slices of one storage do not), or if its strides differ from those of the op's output:
    contiguous, unless the op is declared with ``keeps_strides``.
    """
    named = list(zip(op.schema.names, values, strict=True))
    activations = [
        (name, value)
        for name, value in named
        if name in op.activations and isinstance(value, Tensor)  # not a tracer's proxy
    ]
    return tuple(
        name
        for name, activation in activations
        if (name not in op.keeps_strides and not activation.is_contiguous())
        or overlaps_itself(activation)
        or any(
            torch_compat.share_storage(activation, t) and not disjoint(activation, t)
            for other, value in named
            if other != name
            for t in tensors_in([value])
        )
    )


def poison_unused(op: OpDefinition, values: tuple[Any, ...], result: Any) -> None:
    """Overwrite each donated tensor whose storage no output and no other argument shares."""
    named = list(zip(op.schema.names, values, strict=True))
    alive = tensors_in([result, *(v for n, v in named if n not in op.activations)])
    for tensor in tensors_in([v for n, v in named if n in op.activations]):
        if not any(torch_compat.share_storage(tensor, other) for other in alive):
            _poison(tensor)


def _poison(tensor: Tensor) -> None:
    with torch.inference_mode():  # allows in-place updates of inference tensors too
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
