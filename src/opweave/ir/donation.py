"""Donation: after ``op.maybe_inplace(...)`` the activations belong to the op.

Reading a donated tensor is undefined behaviour, which eager mode would hide whenever the chosen
kernel does not reuse the memory. In check mode (``OPWEAVE_CHECK_DONATION=1``) it shows.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opweave.ir import compat
from opweave.ir.memory import apart, overlaps_itself
from opweave.ir.selection import tensors_in

if TYPE_CHECKING:
    from opweave.ir.op import IrOp


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


def _poison(tensor: Tensor) -> None:
    with torch.inference_mode():  # takes tensors that were made there, and any other
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
