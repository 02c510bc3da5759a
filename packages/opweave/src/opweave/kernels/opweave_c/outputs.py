"""Allocate outputs with the strides that native returns."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.base import compat, plain_call

_empty_like = torch.empty_like
_empty_strided_cpu = compat.empty_strided_cpu
_kernels_are_traced = plain_call.kernels_are_traced


def new_rows(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty contiguous tensor of shape ``(*x.shape[:-1], width)``.

    The dtype is that of *x* by default. *x* must be on the CPU, unless a tracer is active.
    """
    if x.ndim == 2 and not _kernels_are_traced():  # the fast path for the common case
        return _empty_strided_cpu((x.shape[0], width), (width or 1, 1), dtype or x.dtype)
    return _by_dispatcher(x, width, dtype)


def _by_dispatcher(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], width), dtype=dtype)


compat.trace_instead(new_rows, _by_dispatcher)


def half_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor of shape ``(..., d)`` for *x* of shape ``(..., 2 * d)``."""
    width = x.shape[-1] // 2
    return (
        new_rows(x, width, dtype) if x.is_contiguous() else _empty_like(x[..., :width], dtype=dtype)
    )


def row_scales(x: Tensor) -> Tensor:
    """Return an empty float32 tensor ``(..., 1)`` for one scale per row of *x*."""
    return new_rows(x, 1, torch.float32)
