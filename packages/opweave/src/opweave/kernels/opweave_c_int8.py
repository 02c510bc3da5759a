"""Provider ``opweave_c_int8``: linear layers that round activations to 8 bits, for few tokens.

In float32, where users expect sums that are as exact, ``opweave_c`` computes them.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels.arguments import NARROW_FLOATS
from opweave.kernels.opweave_c import linear
from opweave.kernels.opweave_c.calls import implements, native_op, new_rows

_NARROW = rules.dtype("x", *NARROW_FLOATS)
_implements = partial(implements, traits=(), provider="opweave_c_int8")

_linear_w4a16_int8 = native_op("linear_w4a16_int8")
_linear_gguf_int8 = native_op("linear_gguf_int8")

# The largest number of tokens for which these kernels are faster than those of opweave_c for many.
_MAX_TOKENS_W4 = {dtype: 2 * most for dtype, most in linear.MAX_TOKENS_W4.items()}
_MAX_TOKENS_Q = {dtype: 2 * most for dtype, most in linear.MAX_TOKENS_Q.items()}


@_implements(
    ops.linear_w4a16,
    linear.ACCEPTED_W4A16 & _NARROW,
    needs=(*linear.NEEDS, "linear_w4a16_int8"),
)
def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``x @ (weight * scale + offset).T + bias``; *x* is rounded if it has few tokens."""
    if linear.is_known(x.numel() > _MAX_TOKENS_W4[x.dtype] * x.shape[-1]):
        result: Tensor = linear.linear_w4a16(x, weight, scale, offset, bias)
        return result
    out = new_rows(x, weight.shape[0])
    _linear_w4a16_int8(out, x, weight, scale, offset, bias)
    return out


@_implements(ops.linear_q, linear.ACCEPTED_Q & _NARROW, needs=(*linear.NEEDS_Q, "linear_gguf_int8"))
def linear_q(x: Tensor, weight: Tensor, bias: Tensor | None = None, format: str = "q8_0") -> Tensor:
    """Return ``x @ dequantized(weight).T + bias``; *x* is rounded if it has few tokens."""
    if linear.is_known(x.numel() > _MAX_TOKENS_Q[x.dtype] * x.shape[-1]):
        result: Tensor = linear.linear_q(x, weight, bias, format)
        return result
    out = new_rows(x, weight.shape[0])
    _linear_gguf_int8(out, x, weight, bias, linear.FORMATS.index(format))
    return out
