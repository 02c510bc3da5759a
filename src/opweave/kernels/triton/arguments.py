"""What several implementations ask of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.rule import Rule, TensorRule
from opweave.kernels.arguments import FLOATS, one_element
from opweave.kernels.triton.registration import INTERPRETED

MAX_WIDTH = 65536
"""Elements of a row that one program holds in registers."""

on_device = rules.cpu if INTERPRETED else rules.cuda
"""The tensors are where kernels run: on a GPU, or in host memory if Triton is interpreted."""


def rows(name: str) -> Rule:
    """Parameter *name* is a matrix of unbroken rows, or contiguous; of floats, and not too wide."""
    narrow = TensorRule(
        (name,),
        "{t}.shape[-1] <= {0}",
        lambda n, t: f"{n}: rows of {t.shape[-1]} elements (supports up to {MAX_WIDTH})",
        (MAX_WIDTH,),
    )
    return (
        on_device(name)
        & rules.dtype(name, *FLOATS)
        & rules.ndim(name, *range(1, 9))
        & (rules.contiguous(name) | (rules.ndim(name, 2) & rules.unit_stride(name)))
        & narrow
    )


def has_float8(name: str) -> Rule:
    """Parameter *name* is on a device whose float8_e4m3fn Triton knows."""
    return TensorRule(
        (name,),
        "{0}({t})",
        lambda n, t: f"{n}: on {t.device} (supports float8_e4m3fn of NVIDIA from 8.9 on)",
        (_has_float8,),
    )


def _has_float8(x: Tensor) -> bool:
    if INTERPRETED:
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 9)


def one_float32(name: str) -> Rule:
    """Parameter *name* is one float32 on the device (or None, where the op takes that)."""
    return on_device(name) & rules.dtype(name, torch.float32) & one_element(name)


def row_count(x: Tensor) -> int:
    """Return how many rows *x* has.

    >>> row_count(torch.empty(3, 5, 7)), row_count(torch.empty(0, 7)), row_count(torch.empty(7))
    (15, 0, 1)
    """
    return x.shape[:-1].numel()


def row_stride(x: Tensor) -> int:
    """Return the distance of the rows of *x*, in elements."""
    return x.stride(-2) if x.ndim > 1 else 0
