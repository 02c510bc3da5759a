"""Linear layers with weights and activations of 8 bits, which matrix instructions multiply."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.linear_w8a8 import linear_w8a8 as op
from opweave.kernels.low_bit import W8A8, w8a8_fits
from opweave.kernels.triton.arguments import (
    MAX_WIDTH,
    has_float8,
    on_device,
    row_count,
    row_stride,
    spaced_rows,
)
from opweave.kernels.triton.launch import Kernels
from opweave.kernels.triton.outputs import new_rows
from opweave.kernels.triton.product import Tile, multiply
from opweave.kernels.triton.registration import implements

_kernels = Kernels("linear_w8a8")
_DEPTH = 128  # columns: the usual group, and as many as float8 products add up exactly enough
_MIN_DEPTH = 32  # the fewest that a matrix instruction takes


def _fits(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> bool:
    return (
        w8a8_fits(x, x_scale, weight, scale, bias, out_dtype)
        and x.shape[-1] <= MAX_WIDTH  # sums of products of codes fit into 32 bits
        and _depth(_group(x, x_scale), _block(weight, scale)[1], x.shape[-1]) >= _MIN_DEPTH
    )


def _group(x: Tensor, x_scale: Tensor) -> int:
    """Return the number of columns of *x* that share a scale."""
    return x.shape[-1] // (1 if x_scale.numel() == 1 else x_scale.shape[-1])


def _block(weight: Tensor, scale: Tensor) -> tuple[int, int]:
    """Return the number of rows and of columns of *weight* that share a scale."""
    rows, columns = weight.shape
    if scale.numel() == 1:
        return max(rows, 1), columns
    return (1, columns) if scale.ndim == 1 else (rows // scale.shape[0], columns // scale.shape[1])


def _depth(group: int, columns: int, width: int) -> int:
    """Return the number of columns in a step, a power of two, such that each has one scale."""
    shared = gcd(0 if group == width else group, 0 if columns == width else columns)
    return gcd(_DEPTH, shared)


@implements(
    op,
    spaced_rows("x", torch.int8, torch.float8_e4m3fn)
    & on_device("x_scale", "weight", "scale", "bias")
    & (rules.dtype("x", torch.int8) | has_float8("x"))
    & W8A8
    & rules.contiguous("x_scale", "scale")
    & rules.custom(
        _fits,
        f"shapes do not fit, rows have more than {MAX_WIDTH} columns, or the size of a group of "
        f"columns is not a multiple of {_MIN_DEPTH}",
    ),
    traits=(),  # not batch-invariant: tiles and splits depend on the number of tokens
)
def linear_w8a8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``(x * x_scale) @ (weight * scale).T + bias``."""
    out = new_rows(x, weight.shape[0], out_dtype)
    width, group, (rows, columns) = x.shape[-1], _group(x, x_scale), _block(weight, scale)
    is_whole = group == columns == width
    multiply(
        _kernels.linear_w8a8,
        out,
        (x, x_scale, weight, scale),
        bias,
        (
            row_stride(x),
            0 if x_scale.numel() == 1 else width // group,
            weight.stride(0),
            0 if scale.numel() == 1 else width // columns,
            group,
            rows,
            columns,
        ),
        _tile(row_count(x), _depth(group, columns, width)),
        width,
        SCALES_LAST=is_whole and x.dtype is torch.int8,
    )
    return out


def _tile(tokens: int, depth: int) -> Tile:
    """Return the tile: large tiles reuse weights, small ones leave work for all processors."""
    if tokens <= 16:
        return Tile(16, 32, depth)
    return Tile(64, 64, depth) if tokens <= 64 else Tile(128, 128, depth, warps=8, stages=3)
