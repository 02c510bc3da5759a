"""Layer normalisation by the native module.

On the hot path of every layer, as in :mod:`opweave.kernels.opweave_c.norm`: the function calls the
C++ function directly, which refuses anything but plain CPU tensors; torch's dispatcher takes those.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opweave.ir import rules
from opweave.ir.ops.layer_norm import layer_norm as op
from opweave.ir.traits import BATCH_INVARIANT
from opweave.kernels.opweave_c.doors import STATUS, direct, dispatched

_empty_like = torch.empty_like
_contiguous = torch.contiguous_format
_layer_norm = direct("layer_norm")
_layer_norm_op = dispatched("layer_norm")


@op.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=rules.cpu("x", "weight", "bias")
    & rules.ndim("x", *range(1, 9))
    & rules.per_last_dim("weight", "x")
    & rules.per_last_dim("bias", "x")
    & rules.dtype("x", torch.float32, torch.bfloat16, torch.float16)
    & (
        rules.same_dtype("x", "weight", "bias")
        | (rules.dtype("weight", torch.float32) & rules.dtype("bias", torch.float32))
    )
    & rules.unit_stride("x", "weight", "bias"),
    traits={BATCH_INVARIANT},
)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Normalise the rows of *x* (``[..., h]``) into a new tensor."""
    out = _empty_like(x, memory_format=_contiguous)
    if is_dynamo_compiling():
        _layer_norm_op(out, x, weight, bias, epsilon)
        return out
    try:
        _layer_norm(out, x, weight, bias, epsilon)
    except TypeError:
        _layer_norm_op(out, x, weight, bias, epsilon)
    return out
