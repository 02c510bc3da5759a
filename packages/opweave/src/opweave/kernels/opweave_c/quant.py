"""Quantization to 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.ops.quant import scale_covers
from opweave.kernels.opweave_c.arguments import ROWS, SCALE, one_float32
from opweave.kernels.opweave_c.call_paths import implements, native_op
from opweave.kernels.opweave_c.outputs import new_rows, row_scales

_empty = torch.empty
_empty_like = torch.empty_like

_static_quant = native_op("static_quant")
_dynamic_per_token_quant = native_op("dynamic_per_token_quant")
_dynamic_per_tensor_quant = native_op("dynamic_per_tensor_quant_fp8")
_per_token_group_quant = native_op("per_token_group_quant_fp8")

_STATIC = ROWS & SCALE & rules.custom(scale_covers, "scale does not fit x")


@implements(ops.static_quant_fp8, _STATIC)
def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize *x* by given scales into a new float8_e4m3fn tensor."""
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    _static_quant(out, x, scale)
    return out


@implements(ops.static_quant_int8, _STATIC)
def static_quant_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize *x* by given scales into a new int8 tensor."""
    out = _empty_like(x, dtype=torch.int8)
    _static_quant(out, x, scale)
    return out


@implements(ops.dynamic_per_tensor_quant_fp8, ROWS, traits=())
def dynamic_per_tensor_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize *x* by the scale of its largest magnitude."""
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    scale = _empty(1, dtype=torch.float32)
    _dynamic_per_tensor_quant(out, scale, x)
    return out, scale


@implements(ops.dynamic_per_token_quant_fp8, ROWS & one_float32("scale_ub"))
def dynamic_per_token_quant_fp8(x: Tensor, scale_ub: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize every row of *x* by the scale of its largest magnitude."""
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    scale = row_scales(x)
    _dynamic_per_token_quant(out, scale, x, scale_ub)
    return out, scale


@implements(ops.dynamic_per_token_quant_int8, ROWS)
def dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize every row of *x* by the scale of its largest magnitude."""
    out = _empty_like(x, dtype=torch.int8)
    scale = row_scales(x)
    _dynamic_per_token_quant(out, scale, x, None)
    return out, scale


@implements(
    ops.per_token_group_quant_fp8,
    ROWS & rules.custom(lambda group_size: group_size >= 1, "group_size is below 1"),
)
def per_token_group_quant_fp8(
    x: Tensor, group_size: int, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize every group of neighbors in a row of *x* by the scale of its largest magnitude."""
    width = x.shape[-1]
    out = new_rows(x, width, torch.float8_e4m3fn)
    scale = new_rows(x, -(-width // group_size), torch.float32)
    _per_token_group_quant(out, scale, x, group_size, use_ue8m0)
    return out, scale
