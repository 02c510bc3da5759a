"""Linear layers with weights and activations of 8 bits, by the kernels for 8-bit weights.

Activations are dequantized to float32, which is exact for their codes; weights stay narrow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opweave.adapters.opaque import opaque
from opweave.base import compat
from opweave.ir import rules
from opweave.ir.ops.linear_w8a8 import linear_w8a8 as op
from opweave.ir.ops.linear_w8a8 import spread_token_scales
from opweave.kernels.low_bit import W8A8, w8a8_fits
from opweave.kernels.opweave_c.arguments import HAS_DIMS
from opweave.kernels.opweave_c.call_paths import implements, native_op
from opweave.kernels.opweave_c.linear import is_known, linear_w8a16, multiply_by_pieces

_linear_w8a16 = native_op("linear_w8a16")
_widen_rows = native_op("widen_rows")

# From here on, torch's product of integers is faster, where the CPU has instructions for it.
_FEWEST_INTEGERS = 16
_MULTIPLIES_INT8 = compat.has_vnni()
_MOST_COLUMNS = 1 << 17  # for which sums of products fit into 32 bits
# The largest number of tokens to multiply block by block; others multiply widened weights.
_MOST_TOKENS = 16
_FEWEST_ROWS = 16  # of such a block


ACCEPTED = (
    rules.cpu("x", "x_scale", "weight", "scale", "bias")
    & HAS_DIMS
    & W8A8
    & rules.custom(w8a8_fits, "shapes do not fit")
)


@implements(op, ACCEPTED, traits=())
def linear_w8a8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``(x * x_scale) @ (weight * scale).T + bias``."""
    if is_blocked(scale, weight):
        result: Tensor = _by_blocks(x, x_scale, weight, scale, bias, out_dtype)
        return result
    if _multiplies_integers(x, x_scale):
        return _by_integers(x, x_scale, weight, scale, bias).to(out_dtype)
    bias = None if bias is None else bias.float()
    wide = widened(x, x_scale)
    out: Tensor = linear_w8a16(wide, weight, scale.contiguous(), bias)
    return out.to(out_dtype)


def is_blocked(scale: Tensor, weight: Tensor) -> bool:
    """Whether *scale* is not one for the whole *weight* or for each row."""
    return scale.ndim == 2 and scale.numel() > 1 and scale.shape != (weight.shape[0], 1)


def widened(x: Tensor, x_scale: Tensor) -> Tensor:
    """Return the activations in float32."""
    return (x.to(torch.float32) * spread_token_scales(x_scale, x)).contiguous()


def _multiplies_integers(x: Tensor, x_scale: Tensor) -> bool:
    """Return whether products of integers are faster, and each token has one scale at most."""
    return (
        _MULTIPLIES_INT8
        and x.dtype is torch.int8
        and x.shape[-1] <= _MOST_COLUMNS
        and (x_scale.ndim != x.ndim or x_scale.shape[-1] == 1)
        and is_known(x.numel() >= _FEWEST_INTEGERS * x.shape[-1])
    )


def _by_integers(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply codes as integers, which is exact, and scale the sums; float32."""
    sums = compat.multiply_int8(x.reshape(-1, x.shape[-1]).contiguous(), weight.t())
    sums = sums.reshape(*x.shape[:-1], weight.shape[0])
    out = sums.float() * spread_token_scales(x_scale, x) * scale.reshape(-1)
    return out if bias is None else out + bias.float()


@opaque(op, "opweave_c_blocks")
def _by_blocks(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Multiply by blocks with a scale each."""
    tokens = widened(x, x_scale)
    rows = weight.shape[0] // scale.shape[0]
    if x.numel() <= _MOST_TOKENS * x.shape[-1] and rows >= _FEWEST_ROWS:
        return of_blocks(tokens, weight, scale, bias).to(out_dtype)
    of_row = scale.repeat_interleave(rows, 0)
    one = torch.ones(1)

    def widen(wide: Tensor, piece: slice) -> None:
        _widen_rows(wide, weight[piece], one)
        torch.unflatten(wide, 1, (scale.shape[1], -1)).mul_(of_row[piece, :, None])

    offsets = None if bias is None else bias.float()
    pieces = multiply_by_pieces(tokens, weight.shape[0], torch.float32, widen, offsets)
    return pieces.to(out_dtype)


def of_blocks(tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows of blocks by tokens times the scales of these blocks, in float32.

    A row of blocks is contiguous in memory, unlike a column of them.
    """
    flat = tokens.reshape(-1, tokens.shape[-1])
    groups = torch.unflatten(flat, 1, (scale.shape[1], -1))
    parts = torch.unflatten(weight, 0, (scale.shape[0], -1))
    out = tokens.new_empty((scale.shape[0], flat.shape[0], parts.shape[1]))
    one: Any = torch.ones(1)
    for part, factors, found in zip(parts, scale, out, strict=True):
        _linear_w8a16(found, (groups * factors[:, None]).flatten(1), part, one, None)
    joined = out.transpose(0, 1).reshape(*tokens.shape[:-1], weight.shape[0])
    return joined if bias is None else joined + bias.float()
