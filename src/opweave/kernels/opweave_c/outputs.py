"""New memory for results, with native's strides."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.base import compat, torch_state

_empty_like = torch.empty_like
_empty_strided_cpu = compat.empty_strided_cpu
_kernels_are_traced = torch_state.kernels_are_traced


def new_rows(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return new contiguous memory for ``(..., width)`` from *x*, ``(..., d)``.

    *x* is on the CPU, or a mode makes its memory what it is. *dtype*: by default, that of *x*.
    """
    if x.ndim == 2 and not _kernels_are_traced():  # the common case, by the shortest way
        return _empty_strided_cpu((x.shape[0], width), (width or 1, 1), dtype or x.dtype)
    return _by_dispatcher(x, width, dtype)


def _by_dispatcher(x: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], width), dtype=dtype)


compat.trace_instead(new_rows, _by_dispatcher)


def half_of(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return new memory for ``(..., d)`` from *x*, ``(..., 2 * d)``."""
    width = x.shape[-1] // 2
    return (
        new_rows(x, width, dtype) if x.is_contiguous() else _empty_like(x[..., :width], dtype=dtype)
    )


def row_scales(x: Tensor) -> Tensor:
    """Return new memory for one scale per row of *x*: float32 ``(..., 1)``."""
    return new_rows(x, 1, torch.float32)
