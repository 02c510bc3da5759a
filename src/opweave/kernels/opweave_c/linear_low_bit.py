"""Linear layers with 4-bit weights: a kernel for few tokens; for many, torch by pieces."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.base import compat, plain_call
from opweave.ir import rules
from opweave.ir.ops.linear_low_bit import groups_rows
from opweave.ir.ops.linear_low_bit import linear_w4a16 as op_w4a16
from opweave.kernels.arguments import FLOATS
from opweave.kernels.opweave_c.arguments import ROWS
from opweave.kernels.opweave_c.call_paths import STATUS, implements, native_op
from opweave.kernels.opweave_c.linear import has_whole_tiles, is_known, multiply_by_pieces
from opweave.kernels.opweave_c.outputs import new_rows

NEEDS = ("linear_w4a16", "widen_w4")

_linear_w4a16 = native_op("linear_w4a16")
_widen_w4 = native_op("widen_w4")

# The largest number of tokens for which the kernel for few is faster, as measured with 2,048
# columns. Graphs with a dynamic number of tokens use it too.
_MULTIPLIES_BFLOAT16 = "avx512bf16" in STATUS.isa_levels
_MOST_TOKENS = {
    torch.float32: 16,
    torch.bfloat16: 8 if _MULTIPLIES_BFLOAT16 else 16,
    torch.float16: 16,
}
_GROUP = 8  # the kernel's sums are for so many columns


def _fits(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> bool:
    width = 2 * weight.shape[1]
    return (
        x.shape[-1] == width > 0
        and groups_rows(scale, weight)
        and width // scale.shape[1] % _GROUP == 0
        and (offset is None or offset.shape == scale.shape)
        and (bias is None or bias.shape == weight.shape[:1])
    )


ACCEPTED_W4A16 = (
    ROWS
    & rules.cpu("weight", "scale", "offset", "bias")
    & rules.ndim("weight", 2)
    & rules.ndim("scale", 2)
    & rules.unit_stride("weight", "scale", "offset", "bias")
    & rules.dtype("weight", torch.uint8)
    & rules.dtype("scale", *FLOATS)
    & rules.same_dtype("scale", "offset")
    & (rules.same_dtype("x", "bias") | rules.dtype("bias", torch.float32))
    & rules.custom(_fits, f"shapes do not fit, or a group is not a multiple of {_GROUP} columns")
)


@implements(op_w4a16, ACCEPTED_W4A16, traits=(), needs=NEEDS)
def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``x @ (weight * scale + offset).T + bias``; 4-bit weights are widened on the fly."""
    if is_known(x.numel() > _MOST_TOKENS[x.dtype] * x.shape[-1]):
        return _by_pieces(x, weight, scale, offset, bias)
    out = new_rows(x, weight.shape[0])
    _linear_w4a16(out, x, weight, scale, offset, bias)
    return out


def _by_pieces(
    x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Multiply by pieces of *weight*, like those of 8 bits.

    Where the CPU multiplies bfloat16, weights for tokens in bfloat16 are rounded to it: their
    errors average out, and the result has a larger one.
    """
    if plain_call.kernels_are_traced():
        result: Tensor = op_w4a16.native(x, weight, scale, offset, bias)
        return result
    is_narrow = x.dtype is torch.bfloat16 and _MULTIPLIES_BFLOAT16 and has_whole_tiles(x)

    def widen(wide: Tensor, piece: slice) -> None:
        _widen_w4(wide, weight[piece], scale[piece], None if offset is None else offset[piece])

    dtype = torch.bfloat16 if is_narrow else torch.float32
    return multiply_by_pieces(x, weight.shape[0], dtype, widen, bias)


compat.trace_instead(_by_pieces, op_w4a16.native)
