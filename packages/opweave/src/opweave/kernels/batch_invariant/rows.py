"""Call a function with one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

_T = TypeVar("_T")


def of_rows(function: Callable[..., _T], *tensors: Tensor) -> list[_T]:
    """Return the results of *function* for each row of *tensors*, which keeps its dimension.

    Rows are copied, because libraries choose the summation order by memory alignment.
    """
    rows = zip(*tensors, strict=True)
    return [function(*(part.clone()[None] for part in row)) for row in rows]
