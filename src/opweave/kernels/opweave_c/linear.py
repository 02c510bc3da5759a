"""Linear maps by the native module: of few tokens, whose work is to read the weights.

The scale of weights of 8 bits multiplies the sum of the products, not each weight; so a sum may
overflow where activations are near float32's largest number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir import rules
from opweave.ir.ops.linear import linear as op
from opweave.ir.ops.linear import linear_w8a16 as op_w8a16
from opweave.ir.ops.linear import scales_rows
from opweave.kernels.opweave_c.arguments import ROWS
from opweave.kernels.opweave_c.doors import STATUS, implements, native_op

_linear = native_op("linear")
_linear_w8a16 = native_op("linear_w8a16")

# From how many tokens on torch's matrix product is faster, as measured. The choice depends on the
# size of the batch, so it cannot be a predicate's; compiled code has a guard, and so one graph for
# few tokens and one for many. Because torch adds in another order, no implementation here is
# batch-invariant, though the kernels are. torch computes in 16 bits only where the CPU does:
# elsewhere it widens the weights on every call, and was never faster. Where it does, 8 is a guess.
_NEVER = 1 << 62
_16_BITS = 8 if "avx512bf16" in STATUS.isa_levels else _NEVER
_MOST_TOKENS = {torch.float32: 32, torch.bfloat16: _16_BITS, torch.float16: _16_BITS}
_MOST_TOKENS_W8 = 512

_WEIGHT = (
    rules.cpu("weight", "bias") & rules.ndim("weight", 2) & rules.unit_stride("weight", "bias")
)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])


def _fits_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> bool:
    return _fits(x, weight, bias) and scales_rows(scale, weight)


@implements(
    op,
    ROWS
    & _WEIGHT
    & rules.same_dtype("x", "weight", "bias")
    & rules.custom(_fits, "shapes do not fit"),
    traits=(),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply the rows of *x* by *weight*."""
    if x.numel() > _MOST_TOKENS[x.dtype] * x.shape[-1]:
        return functional.linear(x, weight, bias)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    _linear(out, x, weight, bias)
    return out


@implements(
    op_w8a16,
    ROWS
    & _WEIGHT
    & rules.dtype("weight", torch.int8, torch.float8_e4m3fn)
    & rules.cpu("scale")
    & rules.dtype("scale", torch.float32)
    & rules.contiguous("scale")
    & (rules.same_dtype("x", "bias") | rules.dtype("bias", torch.float32))
    & rules.custom(_fits_w8a16, "shapes do not fit"),
    traits=(),
)
def linear_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply the rows of *x* by *weight*, which is widened in registers."""
    if x.numel() > _MOST_TOKENS_W8 * x.shape[-1]:
        result: Tensor = op_w8a16.native(x, weight, scale, bias)
        return result
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    _linear_w8a16(out, x, weight, scale, bias)
    return out
