"""Attributes of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from opweave.layers import weight_loading

__all__ = ["set_weight_attrs"]


def set_weight_attrs(weight: Tensor, weight_attrs: Mapping[str, Any] | None) -> None:
    """Set the attributes that loaders read, such as ``weight_loader`` and ``output_dim``."""
    weight_loading.set_weight_attrs(weight, **(weight_attrs or {}))
