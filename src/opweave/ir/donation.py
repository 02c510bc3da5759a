"""Donation: after ``op.maybe_inplace(...)`` the activations belong to the op.

Reading a donated tensor is undefined behaviour, which eager mode would hide whenever the chosen
kernel does not reuse the memory. In check mode (``OPWEAVE_CHECK_DONATION=1``) it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opweave.ir.selection import tensors_in

if TYPE_CHECKING:
    from opweave.ir.op import IrOp


def poison_unused(op: IrOp, values: tuple[Any, ...], result: Any) -> None:
    """Overwrite every donated tensor whose storage no output and no other argument uses."""
    named = list(zip(op.schema.names, values, strict=True))
    kept = [*tensors_in((result,)), *tensors_in([v for n, v in named if n not in op.activations])]
    storages = {_storage(t) for t in kept}
    for tensor in tensors_in([v for n, v in named if n in op.activations]):
        if _storage(tensor) not in storages:
            _poison(tensor)


def _storage(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _poison(tensor: Tensor) -> None:
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
