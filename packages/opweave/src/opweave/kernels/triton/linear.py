"""Linear layers with quantized weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels import arguments
from opweave.kernels.triton.launch import (
    MANY_BYTES,
    MAX_WIDTH,
    Kernel,
    Kernels,
    has_float8,
    implements,
    launch,
    new_rows,
    on_device,
    row_count,
    row_stride,
    shared_memory,
    spaced_rows,
    split_count,
)

# Launch matrix products with quantized weights.
#
# A program computes a tile of the output. Where there are fewer tiles than the GPU runs
# programs, several programs share the columns of a tile, and a second kernel adds up their
# results.


_product_kernels = Kernels("product")
_MAX_SPLITS = 16
_PER_PROCESSOR = 2  # programs; more splits hide latency better, but their results are large
_MIN_STEPS = 2  # tiles of columns; fewer are not worth a program
_BLOCK = 1024


class Tile(NamedTuple):
    """The part of the product that a program computes.

    Attributes:
        rows: tokens. A matrix instruction takes 16 at least.
        columns: output features.
        depth: input features in a step.
        warps: of a program.
        stages: steps whose loads are in flight.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4


def multiply(
    kernel: Kernel,
    out: Tensor,
    tensors: Sequence[Tensor | None],
    bias: Tensor | None,
    numbers: Sequence[int],
    tile: Tile,
    width: int,
    **constants: object,
) -> None:
    """Launch *kernel* to write products of rows of *width* numbers to *out*.

    Args:
        out: ``(..., features)``, contiguous.
        tensors: arguments of the kernel after *out*, before *bias*.
        numbers: arguments of the kernel after the numbers of tokens, features and columns.
        constants: its compile-time constants other than those of the tile.
    """
    count, features = row_count(out), out.shape[-1]
    grid = (-(-count // tile.rows), -(-features // tile.columns))
    most = min(-(-width // tile.depth) // _MIN_STEPS, _MAX_SPLITS)
    splits = split_count(grid[0] * grid[1], _PER_PROCESSOR, most, out.device)
    parts = out
    if splits > 1:
        parts = out.new_empty((splits, count, features), dtype=torch.float32)
    launch(
        kernel, (*grid, splits),
        parts, *tensors, bias if splits == 1 else None, count, features, width, *numbers,
        **constants, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages if shared_memory(out.device) >= MANY_BYTES else 2,
    )  # fmt: skip
    if splits > 1:
        size = out.numel()
        launch(
            _product_kernels.add_parts, (-(-size // _BLOCK),),
            out, parts, bias, size, features,
            SPLITS=splits, BLOCK=_BLOCK,
        )  # fmt: skip


# Linear layers with weights and activations of 8 bits, which matrix instructions multiply.


_w8a8_kernels = Kernels("linear_w8a8")
_DEPTH = 128  # columns: the usual group, and as many as float8 products add up exactly enough
_MIN_DEPTH = 32  # the fewest that a matrix instruction takes


def _has_whole_steps_w8a8(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor) -> bool:
    """Return whether sums fit into 32 bits, and a step of columns has one scale."""
    return (
        x.shape[-1] <= MAX_WIDTH
        and _depth_w8a8(_group(x, x_scale), _block(weight, scale)[1], x.shape[-1]) >= _MIN_DEPTH
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


def _depth_w8a8(group: int, columns: int, width: int) -> int:
    """Return the number of columns in a step, a power of two, such that each has one scale."""
    shared = gcd(0 if group == width else group, 0 if columns == width else columns)
    return gcd(_DEPTH, shared)


@implements(
    ops.linear_w8a8,
    spaced_rows("x", torch.int8, torch.float8_e4m3fn)
    & on_device("x_scale", "weight", "scale", "bias")
    & (rules.dtype("x", torch.int8) | has_float8("x"))
    & arguments.W8A8
    & rules.contiguous("x_scale", "scale")
    & rules.custom(arguments.w8a8_fits, "shapes do not fit")
    & rules.custom(
        _has_whole_steps_w8a8,
        f"rows have more than {MAX_WIDTH} columns, or the size of a group of columns is not a "
        f"multiple of {_MIN_DEPTH}",
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
    x_scale_stride = 0 if x_scale.numel() == 1 else width // group
    scale_stride = 0 if scale.numel() == 1 else width // columns
    strides = (row_stride(x), x_scale_stride, weight.stride(0), scale_stride)
    multiply(
        _w8a8_kernels.linear_w8a8, out,
        (x, x_scale, weight, scale), bias, (*strides, group, rows, columns),
        _tile_w8a8(row_count(x), _depth_w8a8(group, columns, width)), width,
        SCALES_LAST=is_whole and x.dtype is torch.int8,
    )  # fmt: skip
    return out


def _tile_w8a8(tokens: int, depth: int) -> Tile:
    """Return the tile: large tiles reuse weights, small ones leave work for all processors."""
    if tokens <= 16:
        return Tile(16, 32, depth)
    return Tile(64, 64, depth) if tokens <= 64 else Tile(128, 128, depth, warps=8, stages=3)


# Linear layers with low-bit weights, which are dequantized in registers.
#
# Weights are rounded to the dtype of the activations, in which matrix instructions multiply.


_low_bit_kernels = Kernels("linear_low_bit")

_MAX_GROUPS = 8  # groups per step; the scales of more take as many registers as the weights
_LAYOUTS = {
    "q8_0": (16, 16),
    "q4_0": (16, 16),
    "q4_1": (16, 16),
    "q4_k": (32, 32),
    "q5_k": (32, 32),
    "q6_k": (64, 16),
}
"""The distance of the two columns in a byte, and the number of bytes per group of low bits."""


def _has_whole_steps(weight: Tensor, scale: Tensor) -> bool:
    """Return whether steps of a power of two of columns align with the groups."""
    group = arguments.group_of(weight, scale)
    return scale.shape[1] == 1 or group % _MIN_DEPTH == 0 or _MIN_DEPTH % group == 0


def _depth_low_bit(depth: int, group: int) -> int:
    """Return the columns of a step: whole groups, or a whole part of one.

    >>> [_depth_low_bit(256, group) for group in (512, 128, 96, 32, 8, 2)]
    [256, 256, 32, 256, 64, 32]
    """
    while depth > _MIN_DEPTH and group % depth and (depth % group or depth > _MAX_GROUPS * group):
        depth //= 2
    return depth


@implements(
    ops.linear_w4a16,
    spaced_rows("x", *arguments.FLOATS)
    & on_device("weight", "scale", "offset", "bias")
    & arguments.W4A16
    & rules.custom(arguments.w4a16_fits, "shapes do not fit")
    & rules.custom(
        _has_whole_steps,
        f"the columns of a group are neither a multiple of {_MIN_DEPTH} nor a power of two",
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
    tile, group = _tile_low_bit(row_count(x), x.dtype), arguments.group_of(weight, scale)
    if scale.shape[1] > 1:
        tile = tile._replace(depth=_depth_low_bit(tile.depth, group))
    offset_stride = 0 if offset is None else offset.stride(0)
    strides = (row_stride(x), weight.stride(0), scale.stride(0), offset_stride)
    multiply(
        _low_bit_kernels.linear_w4a16, out,
        (x, weight, scale, offset), bias, (*strides, group),
        tile, x.shape[-1],
        GROUPS=max(tile.depth // group, 1) if scale.shape[1] > 1 else 1,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
    )  # fmt: skip
    return out


@implements(
    ops.linear_q,
    spaced_rows("x", *arguments.FLOATS)
    & on_device("weight", "bias")
    & arguments.Q
    & rules.custom(arguments.q_fits, "shapes do not fit"),
    traits=(),
)
def linear_q(x: Tensor, weight: Tensor, bias: Tensor | None = None, format: str = "q8_0") -> Tensor:
    """Return ``x @ dequantized(weight).T + bias``."""
    out = new_rows(x, weight.shape[0])
    tile, (span, size) = _tile_low_bit(row_count(x), x.dtype), _LAYOUTS[format]
    multiply(
        _low_bit_kernels.linear_q, out,
        (x, weight), bias, (row_stride(x), weight.stride(0)),
        tile._replace(depth=max(tile.depth, 2 * span)), x.shape[-1],
        FORMAT=format, SPAN=span, SIZE=size,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
    )  # fmt: skip
    return out


def _tile_low_bit(tokens: int, dtype: torch.dtype) -> Tile:
    """Return the tile: long steps read few rows of weights fast, large tiles reuse weights."""
    if dtype is torch.float32:  # without tensor cores: operands take most registers
        return Tile(16, 32, 64) if tokens <= 16 else Tile(32, 32, 32)
    if tokens <= 16:
        return Tile(16, 32, 256)
    return Tile(64, 64, 128, stages=3) if tokens <= 64 else Tile(128, 128, 64, warps=8, stages=3)
