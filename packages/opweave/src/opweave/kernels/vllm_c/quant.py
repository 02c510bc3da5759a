"""Quantization to int8.

The kernel that computes scales is left out: it does not give zeros for a row with a NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels.arguments import one_element
from opweave.kernels.vllm_c import library

_ROWS = (
    rules.cpu("x")
    & rules.dtype("x", torch.float32, torch.bfloat16)
    & rules.contiguous("x")
    & rules.last_dim_multiple_of("x", 16)
    & rules.ndim("x", 2)
)


@library.implements(
    ops.static_quant_int8,
    _ROWS & rules.cpu("scale") & rules.dtype("scale", torch.float32) & one_element("scale"),
)
def static_quant_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize with one scale for all of *x*."""
    out = torch.empty_like(x, dtype=torch.int8)
    library.ops().static_scaled_int8_quant(out, x, scale.reshape(1), None)
    return out
