"""New memory for results: contiguous, as that of native for arguments that kernels take."""

from __future__ import annotations

import torch
from torch import Tensor


def new_rows(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return new memory for ``(..., width)`` from *x*, ``(..., d)``; *dtype*: that of *x*."""
    return x.new_empty((*x.shape[:-1], width), dtype=dtype)


def half_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return new memory for ``(..., d)`` from *x*, ``(..., 2 * d)``."""
    return new_rows(x, x.shape[-1] // 2, dtype)


def codes_and_scales(
    x: Tensor, width: int, dtype: torch.dtype, count: int = 1
) -> tuple[Tensor, Tensor]:
    """Return new memory for ``(..., width)`` codes and *count* scales of each row of *x*."""
    return new_rows(x, width, dtype), new_rows(x, count, torch.float32)
