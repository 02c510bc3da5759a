"""Argument rules shared by several implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.rule import Rule
from opweave.kernels.arguments import FLOATS, one_element

MAX_DIMS = 8  # the kernels' limit
HAS_DIMS = rules.ndim("x", *range(1, MAX_DIMS + 1))
SCALE = (
    rules.cpu("scale")
    & rules.dtype("scale", torch.float32)
    & rules.contiguous("scale")
    & rules.ndim("scale", *range(MAX_DIMS + 1))
)
INPUT = rules.cpu("x") & rules.dtype("x", *FLOATS) & HAS_DIMS
ROWS = INPUT & rules.unit_stride("x")


def one_float32(name: str) -> Rule:
    """Require that *name* is one float32 in host memory, or None if it is optional."""
    dims = rules.ndim(name, *range(MAX_DIMS + 1))
    return rules.cpu(name) & rules.dtype(name, torch.float32) & dims & one_element(name)


def in_memory_order(x: Tensor) -> bool:
    """Return whether the strides decrease from left to right, without overlap."""
    return x.is_contiguous() or _is_nested(x.shape, x.stride())


def _is_nested(shape: Sequence[int], strides: Sequence[int]) -> bool:
    reach = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride < reach:
                return False
            reach = stride * size
    return True
