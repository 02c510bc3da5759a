"""Donation: after ``op.maybe_inplace(...)`` the activations belong to the op.

Reading a donated tensor is undefined behavior. Eager mode hides it if the chosen kernel does not
reuse the memory; ``OPWEAVE_CHECK_DONATION=1`` exposes it by overwriting the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opweave.base import compat
from opweave.ir.memory import disjoint, overlaps_itself
from opweave.ir.selection import tensors_in

if TYPE_CHECKING:
    from opweave.ir.op import IrOp


def refused(op: IrOp, values: Sequence[Any]) -> tuple[str, ...]:
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
        for name, given in activations
        if (name not in op.keeps_strides and not given.is_contiguous())
        or overlaps_itself(given)
        or any(
            compat.share_storage(given, t) and not disjoint(given, t)
            for other, value in named
            if other != name
            for t in tensors_in([value])
        )
    )


def poison_unused(op: IrOp, values: tuple[Any, ...], result: Any) -> None:
    """Overwrite each donated tensor whose storage no output and no other argument shares."""
    named = list(zip(op.schema.names, values, strict=True))
    kept = [*tensors_in((result,)), *tensors_in([v for n, v in named if n not in op.activations])]
    for tensor in tensors_in([v for n, v in named if n in op.activations]):
        if not any(compat.share_storage(tensor, other) for other in kept):
            _poison(tensor)


def _poison(tensor: Tensor) -> None:
    with torch.inference_mode():  # allows in-place updates of inference tensors too
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
