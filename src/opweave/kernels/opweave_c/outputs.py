"""New memory for results, with native's strides."""

from __future__ import annotations

import torch
from torch import Tensor

_empty = torch.empty
_empty_like = torch.empty_like


def half_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return new memory for ``(..., d)`` from *x*, ``(..., 2 * d)``."""
    *leading, width = x.shape
    if x.is_contiguous():
        return x.new_empty((*leading, width // 2), dtype=dtype)
    return _empty_like(x[..., : width // 2], dtype=dtype)


def row_scales(x: Tensor) -> Tensor:
    """Return new memory for one scale per row of *x*: float32 ``(..., 1)``."""
    if x.ndim == 2:  # the common case, cheaper than slicing the shape
        return _empty(x.shape[0], 1, dtype=torch.float32)
    return _empty(*x.shape[:-1], 1, dtype=torch.float32)
