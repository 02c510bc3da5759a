"""Argument rules shared by several implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.rule import Rule, TensorRule
from opweave.kernels.arguments import FLOATS, one_element
from opweave.kernels.triton.registration import INTERPRETED

MAX_WIDTH = 65536
"""The largest row, in elements, that one program holds in registers."""

LIBRARY_FLOATS = (torch.float32, torch.float16) if INTERPRETED else FLOATS
"""The dtypes that the kernels of other libraries support."""

on_device = rules.cpu if INTERPRETED else rules.cuda
"""Require that tensors are on a GPU, or on the CPU if Triton is interpreted."""


def spaced_rows(name: str, *dtypes: torch.dtype) -> Rule:
    """Require that *name* has one of *dtypes*, and is contiguous or a matrix of contiguous rows."""
    return (
        on_device(name)
        & rules.dtype(name, *dtypes)
        & rules.ndim(name, *range(1, 9))
        & (rules.contiguous(name) | (rules.ndim(name, 2) & rules.unit_stride(name)))
    )


def rows(name: str) -> Rule:
    """Require that *name* is a float tensor, contiguous or a matrix with contiguous rows.

    The rows must have at most :data:`MAX_WIDTH` elements.
    """
    narrow = TensorRule(
        (name,),
        "{t}.shape[-1] <= {0}",
        lambda n, t: f"{n}: rows of {t.shape[-1]} elements (supports up to {MAX_WIDTH})",
        (MAX_WIDTH,),
    )
    return spaced_rows(name, *FLOATS) & narrow


def library_rows(name: str) -> Rule:
    """Require rows that the kernels of another library can read: contiguous, and as :func:`rows`.

    These kernels compute with bfloat16 numbers, of which Triton's interpreter multiplies the bits.
    """
    contiguous = rows(name) & rules.contiguous(name)
    return contiguous & rules.dtype(name, *LIBRARY_FLOATS)


def has_float8(name: str) -> Rule:
    """Require that *name* is on a device for which Triton supports float8_e4m3fn."""
    return TensorRule(
        (name,),
        "{0}({t})",
        lambda n, t: f"{n}: on {t.device} (float8_e4m3fn needs NVIDIA compute capability 8.9)",
        (_has_float8,),
    )


def _has_float8(x: Tensor) -> bool:
    if INTERPRETED:
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 9)


def one_float32(name: str) -> Rule:
    """Require that *name* is one float32 on the device, or None if it is optional."""
    return on_device(name) & rules.dtype(name, torch.float32) & one_element(name)


def row_count(x: Tensor) -> int:
    """Return the number of rows of *x*.

    >>> row_count(torch.empty(3, 5, 7)), row_count(torch.empty(0, 7)), row_count(torch.empty(7))
    (15, 0, 1)
    """
    return x.shape[:-1].numel()


def row_stride(x: Tensor) -> int:
    """Return the row stride of *x*, in elements."""
    return x.stride(-2) if x.ndim > 1 else 0
