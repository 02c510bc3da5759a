"""Launch matrix products with quantized weights.

A program computes a tile of the output. Where there are fewer tiles than the GPU runs programs,
several programs share the columns of a tile, and a second kernel adds up their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opweave.kernels.triton.arguments import row_count
from opweave.kernels.triton.device import MANY_BYTES, shared_memory, split_count
from opweave.kernels.triton.launch import Kernel, Kernels, launch

_kernels = Kernels("product")
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
        kernel,
        (*grid, splits),
        parts,
        *tensors,
        bias if splits == 1 else None,
        count,
        features,
        width,
        *numbers,
        **constants,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages if shared_memory(out.device) >= MANY_BYTES else 2,
    )
    if splits > 1:
        size = out.numel()
        launch(
            _kernels.add_parts,
            (-(-size // _BLOCK),),
            out,
            parts,
            bias,
            size,
            features,
            SPLITS=splits,
            BLOCK=_BLOCK,
        )
