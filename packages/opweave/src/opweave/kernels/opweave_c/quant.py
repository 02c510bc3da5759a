"""Quantization to 8 bits, also fused with norms and activations."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.ops.quant import scale_covers
from opweave.kernels.opweave_c.calls import (
    ROWS,
    SCALE,
    half_of,
    implements,
    in_memory_order,
    native_op,
    new_rows,
    one_float32,
    row_scales,
)

# Quantization to 8 bits.


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


# Norms and activations fused with the quantization of their result.


_rms_norm_static = native_op("rms_norm_static_quant")
_rms_norm_per_token = native_op("rms_norm_per_token_quant")
_fused_add_static = native_op("fused_add_rms_norm_static_quant")
_fused_add_per_token = native_op("fused_add_rms_norm_per_token_quant")
_silu_static = native_op("silu_and_mul_static_quant")
_silu_per_token = native_op("silu_and_mul_per_token_quant")
_silu_groups = native_op("silu_and_mul_group_quant_fp8")

_NORM = (
    ROWS
    & rules.cpu("weight")
    & rules.per_last_dim("weight", "x")
    & (rules.same_dtype("x", "weight") | rules.dtype("weight", torch.float32))
    & rules.unit_stride("weight")
)


def _in_one_order(x: Tensor, x_residual: Tensor) -> bool:
    """Return whether ``x + x_residual`` has the strides of ``empty_like(x)``."""
    return x.stride() == x_residual.stride() or (in_memory_order(x) and in_memory_order(x_residual))


_ADD = (
    _NORM
    & rules.cpu("x_residual")
    & rules.same_dtype("x", "x_residual")
    & rules.same_shape("x", "x_residual")
    & rules.unit_stride("x_residual")
)
_IN_ONE_ORDER = rules.contiguous("x", "x_residual") | rules.custom(
    _in_one_order, "x and x_residual have different memory orders"
)
_GATED = ROWS & rules.last_dim_multiple_of("x", 2)


@implements(ops.rms_norm_static_quant_fp8, _NORM & one_float32("scale"))
def rms_norm_static_quant_fp8(
    x: Tensor, weight: Tensor | None, epsilon: float, scale: Tensor
) -> Tensor:
    """Normalize the rows of *x*, and quantize them by one given scale."""
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    _rms_norm_static(out, x, weight, scale, epsilon)
    return out


@implements(ops.rms_norm_dynamic_per_token_quant_fp8, _NORM & one_float32("scale_ub"))
def rms_norm_dynamic_per_token_quant_fp8(
    x: Tensor, weight: Tensor | None, epsilon: float, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalize the rows of *x*, and quantize each by the scale of its largest magnitude."""
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    scale = row_scales(x)
    _rms_norm_per_token(out, scale, x, weight, epsilon, scale_ub)
    return out, scale


@implements(ops.rms_norm_dynamic_per_token_quant_int8, _NORM)
def rms_norm_dynamic_per_token_quant_int8(
    x: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Normalize the rows of *x*, and quantize each by the scale of its largest magnitude."""
    out = _empty_like(x, dtype=torch.int8)
    scale = row_scales(x)
    _rms_norm_per_token(out, scale, x, weight, epsilon, None)
    return out, scale


@implements(ops.fused_add_rms_norm_static_quant_fp8, _ADD & one_float32("scale") & _IN_ONE_ORDER)
def fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Add, normalize the sum, and quantize it by one given scale."""
    residual = _empty_like(x)
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    _fused_add_static(out, residual, x, x_residual, weight, scale, epsilon)
    return out, residual


@implements(
    ops.fused_add_rms_norm_dynamic_per_token_quant_fp8,
    _ADD & one_float32("scale_ub") & _IN_ONE_ORDER,
)
def fused_add_rms_norm_dynamic_per_token_quant_fp8(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    scale_ub: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add, normalize the sum, and quantize its rows by the scales of their largest magnitudes."""
    residual = _empty_like(x)
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    scale = row_scales(x)
    _fused_add_per_token(out, scale, residual, x, x_residual, weight, epsilon, scale_ub)
    return out, scale, residual


@implements(ops.fused_add_rms_norm_dynamic_per_token_quant_int8, _ADD & _IN_ONE_ORDER)
def fused_add_rms_norm_dynamic_per_token_quant_int8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add, normalize the sum, and quantize its rows by the scales of their largest magnitudes."""
    residual = _empty_like(x)
    out = _empty_like(x, dtype=torch.int8)
    scale = row_scales(x)
    _fused_add_per_token(out, scale, residual, x, x_residual, weight, epsilon, None)
    return out, scale, residual


@implements(ops.silu_and_mul_static_quant_fp8, _GATED & one_float32("scale"))
def silu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Activate, multiply, and quantize by one given scale."""
    out = half_of(x, torch.float8_e4m3fn)
    _silu_static(out, x, scale)
    return out


@implements(ops.silu_and_mul_dynamic_per_token_quant_fp8, _GATED & one_float32("scale_ub"))
def silu_and_mul_dynamic_per_token_quant_fp8(
    x: Tensor, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Activate, multiply, and quantize each row by the scale of its largest magnitude."""
    out = half_of(x, torch.float8_e4m3fn)
    scale = row_scales(x)
    _silu_per_token(out, scale, x, scale_ub)
    return out, scale


@implements(ops.silu_and_mul_dynamic_per_token_quant_int8, _GATED)
def silu_and_mul_dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activate, multiply, and quantize each row by the scale of its largest magnitude."""
    out = half_of(x, torch.int8)
    scale = row_scales(x)
    _silu_per_token(out, scale, x, None)
    return out, scale


@implements(
    ops.silu_and_mul_per_token_group_quant_fp8,
    _GATED & rules.custom(lambda group_size: group_size >= 1, "group_size is below 1"),
)
def silu_and_mul_per_token_group_quant_fp8(
    x: Tensor, group_size: int, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Activate, multiply, and quantize each group by the scale of its largest magnitude."""
    width = x.shape[-1] // 2
    out = new_rows(x, width, torch.float8_e4m3fn)
    scale = new_rows(x, -(-width // group_size), torch.float32)
    _silu_groups(out, scale, x, group_size, use_ue8m0)
    return out, scale
