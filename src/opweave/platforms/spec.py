"""What the engine and the platform tell each other about attention and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class DeviceCapability(NamedTuple):
    """The version of a device's architecture, as its vendor counts: 9.0 for an H100.

    Attributes:
        major: the number before the point.
        minor: the number after it.
    """

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What one attention layer computes, for the platform to choose an implementation.

    Attributes:
        num_heads: of the queries.
        num_kv_heads: of keys and values; divides `num_heads`.
        head_size: elements of one head of queries and keys.
        dtype: of queries, keys and values.
        window: each token attends to this many positions at most; None: all.
        scale: of the scores; None: ``head_size ** -0.5``.
        soft_cap: the scores are bounded by ``soft_cap * tanh(score / soft_cap)``; None: not.
        is_latent: multi-head latent attention: the cache has one row for all heads, of
            ``head_size`` elements.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    is_latent: bool = False
