"""Linear layers with low-bit weights, which are dequantized in registers.

Weights are rounded to the dtype of the activations, which is that of the matrix instructions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.linear_low_bit import linear_q as op_q
from opweave.ir.ops.linear_low_bit import linear_w4a16 as op_w4a16
from opweave.kernels.arguments import FLOATS
from opweave.kernels.low_bit import W4A16, Q, group_of, q_fits, w4a16_fits
from opweave.kernels.triton.arguments import on_device, row_count, row_stride, spaced_rows
from opweave.kernels.triton.launch import Kernels
from opweave.kernels.triton.outputs import new_rows
from opweave.kernels.triton.product import Tile, multiply
from opweave.kernels.triton.registration import implements

_kernels = Kernels("linear_low_bit")
_MIN_DEPTH = 32  # columns: two products of 16, the fewest that a matrix instruction takes

_MAX_GROUPS = 8  # of a step: the scales of more take as many registers as the weights
_LAYOUTS = {
    "q8_0": (16, 16),
    "q4_0": (16, 16),
    "q4_1": (16, 16),
    "q4_k": (32, 32),
    "q5_k": (32, 32),
    "q6_k": (64, 16),
}
"""How far apart the columns in a byte are, and the bytes whose low bits belong to one group."""


def _fits(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> bool:
    return w4a16_fits(x, weight, scale, offset, bias) and _has_whole_steps(weight, scale)


def _has_whole_steps(weight: Tensor, scale: Tensor) -> bool:
    """Return whether a power of two of columns has whole groups, or is a whole part of one."""
    group = group_of(weight, scale)
    return scale.shape[1] == 1 or group % _MIN_DEPTH == 0 or _MIN_DEPTH % group == 0


def _depth(depth: int, group: int) -> int:
    """Return the columns of a step: whole groups, or a whole part of one.

    >>> [_depth(256, group) for group in (512, 128, 96, 32, 8, 2)]
    [256, 256, 32, 256, 64, 32]
    """
    while depth > _MIN_DEPTH and group % depth and (depth % group or depth > _MAX_GROUPS * group):
        depth //= 2
    return depth


@implements(
    op_w4a16,
    spaced_rows("x", *FLOATS)
    & on_device("weight", "scale", "offset", "bias")
    & W4A16
    & rules.custom(
        _fits,
        "shapes do not fit, or the columns of a group are neither a multiple of "
        f"{_MIN_DEPTH} nor a power of two",
    ),
    traits=(),  # not batch-invariant: tiles and splits depend on the number of tokens
)
def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``x @ (weight * scale + offset).T + bias``."""
    out = new_rows(x, weight.shape[0])
    tile, group = _tile(row_count(x), x.dtype), group_of(weight, scale)
    if scale.shape[1] > 1:
        tile = tile._replace(depth=_depth(tile.depth, group))
    multiply(
        _kernels.linear_w4a16,
        out,
        (x, weight, scale, offset),
        bias,
        (
            row_stride(x),
            weight.stride(0),
            scale.stride(0),
            0 if offset is None else offset.stride(0),
            group,
        ),
        tile,
        x.shape[-1],
        GROUPS=max(tile.depth // group, 1) if scale.shape[1] > 1 else 1,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
    )
    return out


@implements(
    op_q,
    spaced_rows("x", *FLOATS)
    & on_device("weight", "bias")
    & Q
    & rules.custom(q_fits, "shapes do not fit"),
    traits=(),
)
def linear_q(x: Tensor, weight: Tensor, bias: Tensor | None = None, format: str = "q8_0") -> Tensor:
    """Return ``x @ dequantized(weight).T + bias``."""
    out = new_rows(x, weight.shape[0])
    tile, (span, size) = _tile(row_count(x), x.dtype), _LAYOUTS[format]
    multiply(
        _kernels.linear_q,
        out,
        (x, weight),
        bias,
        (row_stride(x), weight.stride(0)),
        tile._replace(depth=max(tile.depth, 2 * span)),
        x.shape[-1],
        FORMAT=format,
        SPAN=span,
        SIZE=size,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
    )
    return out


def _tile(tokens: int, dtype: torch.dtype) -> Tile:
    """Return the tile: long steps read few rows of weights fast, large tiles reuse weights."""
    if dtype is torch.float32:  # without tensor cores: operands take most registers
        return Tile(16, 32, 64) if tokens <= 16 else Tile(32, 32, 32)
    if tokens <= 16:
        return Tile(16, 32, 256)
    return Tile(64, 64, 128, stages=3) if tokens <= 64 else Tile(128, 128, 64, warps=8, stages=3)
