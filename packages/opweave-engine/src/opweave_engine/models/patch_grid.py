"""The positions of image patches in two dimensions, and rotary embedding for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from opweave_engine.models.errors import ModelError


class PatchGridError(ModelError, ValueError):
    """The patches of an image cannot be merged: a side is not a multiple of the square's."""


class PatchGrid(NamedTuple):
    """The packed patches of several images or videos.

    The patches of a frame are in merge order: square after square.

    Attributes:
        positions: ``(patches, 2)``, int64: row and column.
        cu_seqlens: ``(frames + 1,)``, int32: the start of each frame, and the end of the last.
    """

    positions: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, sizes: Iterable[Sequence[int]], merge: int) -> Self:
        """Return the grid of images of the given *sizes*: ``(frames, rows, columns)`` of patches.

        Args:
            sizes: the size of each image; a video has several frames.
            merge: squares of *merge* by *merge* patches become one token.

        Raises:
            PatchGridError: rows or columns are not a multiple of *merge*.

        Examples:
            >>> PatchGrid.of([(1, 2, 4)], 2).positions.tolist()
            [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
        """
        positions, lengths = [torch.empty(0, 2, dtype=torch.int64)], [0]
        for frames, rows, columns in sizes:
            positions.append(_squares(rows, columns, merge).repeat(frames, 1))
            lengths += [rows * columns] * frames
        return cls(torch.cat(positions), torch.tensor(lengths).cumsum(0).to(torch.int32))


def _squares(rows: int, columns: int, merge: int) -> Tensor:
    if rows % merge or columns % merge:
        raise PatchGridError(
            f"an image of {rows} by {columns} patches cannot be merged in squares of {merge} by "
            f"{merge}; resize it to a multiple."
        )
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    squares = grid.view(rows // merge, merge, columns // merge, merge, 2)
    return squares.transpose(1, 2).reshape(-1, 2)


class AxialRope(nn.Module):
    """The angles of rows rotate the first half of a head's pairs, those of columns the second.

    Args:
        head_dim: the size of a head, a multiple of 4.
        theta: the base of the frequencies.
    """

    frequencies: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        powers = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        self.register_buffer("frequencies", theta**-powers, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, ``(patches, head_dim / 2)``, float32, of *positions*."""
        angles = (positions[..., None] * self.frequencies).flatten(1)
        return angles.cos(), angles.sin()
