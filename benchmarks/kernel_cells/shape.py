"""The sizes that a cell measures a kernel on, and tensors of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_SIZE = 128
QUERIES_PER_KEY_HEAD = 4
BLOCK_SIZE = 64
_PERIOD = 4099


@dataclass(frozen=True, slots=True)
class Shape:
    """So many tokens of so many numbers; *context* is the cached keys of a sequence, if any."""

    tokens: int
    hidden: int
    dtype: torch.dtype
    context: int = 0

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_SIZE

    @property
    def key_heads(self) -> int:
        return max(1, self.heads // QUERIES_PER_KEY_HEAD)

    def values(self, *size: int) -> Tensor:
        """Normally distributed numbers; they repeat, since making them would take minutes."""
        count = math.prod(size)
        repeated = torch.randn(_PERIOD).to(self.dtype).repeat(-(-count // _PERIOD))
        return repeated[:count].view(size)

    def rows(self, width: int | None = None) -> Tensor:
        """Activations, ``(tokens, width)``; *width* is hidden by default."""
        return self.values(self.tokens, width or self.hidden)

    def weight(self) -> Tensor:
        return self.values(self.hidden)

    def scale(self) -> Tensor:
        return torch.full((1,), 0.02)
