"""Layer norm."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.layer_norm import layer_norm as op
from opweave.kernels.opweave_c.arguments import ROWS
from opweave.kernels.opweave_c.call_paths import implements, native_op

_empty_like = torch.empty_like
_contiguous = torch.contiguous_format
_layer_norm = native_op("layer_norm")


@implements(
    op,
    ROWS
    & rules.cpu("weight", "bias")
    & rules.per_last_dim("weight", "x")
    & rules.per_last_dim("bias", "x")
    & (
        rules.same_dtype("x", "weight", "bias")
        | (rules.dtype("weight", torch.float32) & rules.dtype("bias", torch.float32))
    )
    & rules.unit_stride("weight", "bias"),
)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Normalize the rows of *x* (``[..., h]``) into a new tensor."""
    out = _empty_like(x, memory_format=_contiguous)
    _layer_norm(out, x, weight, bias, epsilon)
    return out
