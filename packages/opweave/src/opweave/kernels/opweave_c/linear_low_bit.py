"""Linear layers with low-bit weights: kernels for few tokens and, with AMX, for many in bfloat16.

Otherwise, many tokens are multiplied by torch, by pieces of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.base import compat, plain_call
from opweave.ir import rules
from opweave.ir.ops.linear_low_bit import linear_q as op_q
from opweave.ir.ops.linear_low_bit import linear_w4a16 as op_w4a16
from opweave.kernels.low_bit import W4A16, Q, group_of, q_fits, w4a16_fits
from opweave.kernels.opweave_c.arguments import ROWS
from opweave.kernels.opweave_c.call_paths import STATUS, implements, native_op
from opweave.kernels.opweave_c.linear import has_whole_tiles, is_known, multiply_by_pieces
from opweave.kernels.opweave_c.outputs import new_rows

NEEDS = ("linear_w4a16", "linear_w4a16_many", "widen_w4")
NEEDS_Q = ("linear_gguf", "linear_gguf_many", "widen_gguf")

_linear_w4a16 = native_op("linear_w4a16")
_linear_w4a16_many = native_op("linear_w4a16_many")
_widen_w4 = native_op("widen_w4")
_linear_gguf = native_op("linear_gguf")
_linear_gguf_many = native_op("linear_gguf_many")
_widen_gguf = native_op("widen_gguf")

# The largest number of tokens for which the kernel for few is faster, as measured with 2,048
# columns. Graphs with a dynamic number of tokens use it too.
_MULTIPLIES_BFLOAT16 = "avx512bf16" in STATUS.isa_levels
_MOST_TOKENS = {
    torch.float32: 24,
    torch.bfloat16: 12 if _MULTIPLIES_BFLOAT16 else 32,
    torch.float16: 32,
}
_MOST_TOKENS_Q = {
    torch.float32: 12,
    torch.bfloat16: 6 if _MULTIPLIES_BFLOAT16 else 12,
    torch.float16: 12,
}
# The smallest number of tokens in bfloat16 for which the tiles of AMX are faster; None: there are
# none. Like torch by pieces, they round the weights to bfloat16.
_FEWEST = 7 if STATUS.isa == "amx" else None
_MANY_GROUP = 32  # groups of such weights are a multiple of this
FORMATS = ("q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k")  # in the order of the native op
_GROUP = 8  # the kernel's sums are for so many columns


def _fits(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> bool:
    return w4a16_fits(x, weight, scale, offset, bias) and group_of(weight, scale) % _GROUP == 0


ACCEPTED_W4A16 = (
    ROWS
    & rules.cpu("weight", "scale", "offset", "bias")
    & W4A16
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
    is_narrow = _FEWEST is not None and x.dtype is torch.bfloat16
    if is_narrow and group_of(weight, scale) % _MANY_GROUP == 0:
        out = new_rows(x, weight.shape[0])
        _linear_w4a16_many(out, x, weight, scale, offset, bias, _FEWEST)
        return out
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
    errors average out, and the rounding of the result is as large.
    """
    if plain_call.kernels_are_traced():
        result: Tensor = op_w4a16.native(x, weight, scale, offset, bias)
        return result

    def widen(wide: Tensor, piece: slice) -> None:
        _widen_w4(wide, weight[piece], scale[piece], None if offset is None else offset[piece])

    return multiply_by_pieces(x, weight.shape[0], _dtype_of_pieces(x, bias), widen, bias)


compat.trace_instead(_by_pieces, op_w4a16.native)


def _dtype_of_pieces(x: Tensor, bias: Tensor | None) -> torch.dtype:
    """Return the dtype to multiply in; a float32 bias must not be rounded to bfloat16."""
    is_narrow = (
        x.dtype is torch.bfloat16
        and _MULTIPLIES_BFLOAT16
        and has_whole_tiles(x)
        and (bias is None or bias.dtype is torch.bfloat16)
    )
    return torch.bfloat16 if is_narrow else torch.float32


ACCEPTED_Q = ROWS & rules.cpu("weight", "bias") & Q & rules.custom(q_fits, "shapes do not fit")


@implements(op_q, ACCEPTED_Q, traits=(), needs=NEEDS_Q)
def linear_q(x: Tensor, weight: Tensor, bias: Tensor | None = None, format: str = "q8_0") -> Tensor:
    """Return ``x @ dequantized(weight).T + bias``; blocks are dequantized on the fly."""
    if _FEWEST is not None and x.dtype is torch.bfloat16:
        out = new_rows(x, weight.shape[0])
        _linear_gguf_many(out, x, weight, bias, FORMATS.index(format), _FEWEST)
        return out
    if is_known(x.numel() > _MOST_TOKENS_Q[x.dtype] * x.shape[-1]):
        return _by_pieces_q(x, weight, bias, format)
    out = new_rows(x, weight.shape[0])
    _linear_gguf(out, x, weight, bias, FORMATS.index(format))
    return out


def _by_pieces_q(x: Tensor, weight: Tensor, bias: Tensor | None, format: str) -> Tensor:
    """Multiply by pieces of *weight*, like those of ``linear_w4a16``."""
    if plain_call.kernels_are_traced():
        result: Tensor = op_q.native(x, weight, bias, format)
        return result
    index = FORMATS.index(format)

    def widen(wide: Tensor, piece: slice) -> None:
        _widen_gguf(wide, weight[piece], index)

    return multiply_by_pieces(x, weight.shape[0], _dtype_of_pieces(x, bias), widen, bias)


compat.trace_instead(_by_pieces_q, op_q.native)
