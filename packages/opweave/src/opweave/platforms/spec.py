"""Descriptions of attention layers and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class DeviceCapability(NamedTuple):
    """The version of a device's architecture, such as 9.0 for an H100.

    Attributes:
        major: major version.
        minor: minor version.
    """

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """An attention layer, for the choice of an implementation by the platform.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads; divides `num_heads`.
        head_size: size of a query or key head.
        dtype: dtype of queries, keys and values.
        window: size of the sliding window, or None.
        scale: factor of the scores, or None for ``head_size ** -0.5``.
        soft_cap: replace scores by ``soft_cap * tanh(score / soft_cap)``, or None.
        is_latent: multi-head latent attention: the cache has one row of ``head_size`` elements for
            all heads.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    is_latent: bool = False
