"""Rounds a matrix to int4 in groups, in the layout of compressed-tensors' pack-quantized."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST, _GREATEST = -8, 7
# Scales that are tried for each group, as shares of the one that clips nothing.
_SHARES = tuple(1 - 0.025 * step for step in range(11))
_ROWS = 1024  # rounded at once, so that intermediate results stay small


def quantized_int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    """Return the tensors of a symmetric int4 matrix, by the last part of their names.

    Numbers are rounded to the nearest. The scale of a group is the one of a few that gives the
    least squared error, because clipping the largest number often pays (arXiv:1902.01917).

    Args:
        weight: ``(out, in)``, float32, float16 or bfloat16; finite.
        group: numbers in a row that share a scale; it divides the inputs, and 8 divides it.
    """
    parts = [_rounded(rows, group) for rows in torch.split(weight, _ROWS)]
    q, scale = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    packed = q[:, ::2] | (q[:, 1::2] << 4)
    return {
        "weight_packed": packed.view(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def _rounded(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return numbers from 0 to 15, ``(out, in)``, and scales ``(out, in / group)``."""
    grouped = torch.unflatten(weight.float(), 1, (-1, group))
    whole = grouped.abs().amax(-1, keepdim=True) / _GREATEST
    best = torch.full_like(whole, torch.inf)
    q, scale = torch.zeros_like(grouped), torch.ones_like(whole)
    kind = torch.finfo(weight.dtype)
    # Scales of float16 may be subnormal, so that small weights are not rounded to zero.
    least = max(kind.tiny * kind.eps, torch.finfo(torch.float32).tiny)
    for share in _SHARES:
        # The numbers are rounded for the scale as it is stored.
        tried = (whole * share).clamp(min=least).to(weight.dtype).float()
        rounded = (grouped / tried).round().clamp(_LEAST, _GREATEST)
        error = (rounded * tried - grouped).square().sum(-1, keepdim=True)
        is_better = error < best
        q, scale = torch.where(is_better, rounded, q), torch.where(is_better, tried, scale)
        best = torch.where(is_better, error, best)
    numbers = (q - _LEAST).to(torch.uint8).flatten(1)
    return numbers, scale.squeeze(-1).to(weight.dtype)
