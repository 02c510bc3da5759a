"""Allocate outputs, which are contiguous like those of native."""

from __future__ import annotations

import torch
from torch import Tensor


def new_rows(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor ``(*x.shape[:-1], width)``, by default with the dtype of *x*."""
    return x.new_empty((*x.shape[:-1], width), dtype=dtype)


def half_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of shape ``(..., d)`` for *x* of shape ``(..., 2 * d)``."""
    return new_rows(x, x.shape[-1] // 2, dtype)


def codes_and_scales(
    x: Tensor, width: int, dtype: torch.dtype, count: int = 1
) -> tuple[Tensor, Tensor]:
    """Return empty tensors for ``(..., width)`` codes, and float32 ``(..., count)`` scales."""
    return new_rows(x, width, dtype), new_rows(x, count, torch.float32)
