"""A norm or an activation and the quantisation of its result, by the native module in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops import fused_quant as ops
from opweave.kernels.opweave_c.doors import STATUS
from opweave.kernels.opweave_c.quant import INPUT, native_op, one_float32, row_scales

_empty = torch.empty
_empty_like = torch.empty_like

_rms_norm_static = native_op("rms_norm_static_quant")
_rms_norm_per_token = native_op("rms_norm_per_token_quant")
_fused_add_static = native_op("fused_add_rms_norm_static_quant")
_fused_add_per_token = native_op("fused_add_rms_norm_per_token_quant")
_silu_static = native_op("silu_and_mul_static_quant")
_silu_per_token = native_op("silu_and_mul_per_token_quant")
_silu_groups = native_op("silu_and_mul_group_quant_fp8")

_NORM = (
    INPUT
    & rules.cpu("weight")
    & rules.per_last_dim("weight", "x")
    & (rules.same_dtype("x", "weight") | rules.dtype("weight", torch.float32))
    & rules.unit_stride("x", "weight")
)


def _in_one_order(x: Tensor, x_residual: Tensor) -> bool:
    """Whether the strides of the sum are those of a copy of *x*."""
    return x.stride() == x_residual.stride() or (_descends(x) and _descends(x_residual))


def _descends(x: Tensor) -> bool:
    """Whether the dimensions are in the order of memory, each stepping over the next one."""
    reach = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if size != 1:
            if stride < reach:
                return False
            reach = stride * size
    return True


def _half(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return new memory for ``(..., d)`` from *x*, ``(..., 2 * d)``, strided as native's result."""
    *leading, width = x.shape
    if x.is_contiguous():
        return _empty((*leading, width // 2), dtype=dtype)
    return _empty_like(x[..., : width // 2], dtype=dtype)


_ADD = (
    _NORM
    & rules.cpu("x_residual")
    & rules.same_dtype("x", "x_residual")
    & rules.same_shape("x", "x_residual")
    & rules.unit_stride("x_residual")
)
_ORDER = "x and x_residual are not in one order of memory"
_GATED = INPUT & rules.last_dim_multiple_of("x", 2) & rules.unit_stride("x")


@ops.rms_norm_static_quant_fp8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_NORM & one_float32("scale"),
    traits={"batch_invariant"},
)
def rms_norm_static_quant_fp8(
    x: Tensor, weight: Tensor | None, epsilon: float, scale: Tensor
) -> Tensor:
    """Normalise the rows of *x*, and quantise them by one given scale."""
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    _rms_norm_static(out, x, weight, scale, epsilon)
    return out


@ops.rms_norm_dynamic_per_token_quant_fp8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_NORM & one_float32("scale_ub"),
    traits={"batch_invariant"},
)
def rms_norm_dynamic_per_token_quant_fp8(
    x: Tensor, weight: Tensor | None, epsilon: float, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalise the rows of *x*, and quantise each by the scale of its largest magnitude."""
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    scale = row_scales(x)
    _rms_norm_per_token(out, scale, x, weight, epsilon, scale_ub)
    return out, scale


@ops.rms_norm_dynamic_per_token_quant_int8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_NORM,
    traits={"batch_invariant"},
)
def rms_norm_dynamic_per_token_quant_int8(
    x: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Normalise the rows of *x*, and quantise each by the scale of its largest magnitude."""
    out = _empty_like(x, dtype=torch.int8)
    scale = row_scales(x)
    _rms_norm_per_token(out, scale, x, weight, epsilon, None)
    return out, scale


@ops.fused_add_rms_norm_static_quant_fp8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_ADD
    & one_float32("scale")
    & (
        rules.contiguous("x", "x_residual")
        | rules.custom(
            lambda x, x_residual, weight, epsilon, scale: _in_one_order(x, x_residual), _ORDER
        )
    ),
    traits={"batch_invariant"},
)
def fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Add, normalise the sum, and quantise it by one given scale."""
    residual = _empty_like(x)
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    _fused_add_static(out, residual, x, x_residual, weight, scale, epsilon)
    return out, residual


@ops.fused_add_rms_norm_dynamic_per_token_quant_fp8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_ADD
    & one_float32("scale_ub")
    & (
        rules.contiguous("x", "x_residual")
        | rules.custom(
            lambda x, x_residual, weight, epsilon, scale_ub=None: _in_one_order(x, x_residual),
            _ORDER,
        )
    ),
    traits={"batch_invariant"},
)
def fused_add_rms_norm_dynamic_per_token_quant_fp8(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    scale_ub: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add, normalise the sum, and quantise its rows by the scales of their largest magnitudes."""
    residual = _empty_like(x)
    out = _empty_like(x, dtype=torch.float8_e4m3fn)
    scale = row_scales(x)
    _fused_add_per_token(out, scale, residual, x, x_residual, weight, epsilon, scale_ub)
    return out, scale, residual


@ops.fused_add_rms_norm_dynamic_per_token_quant_int8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_ADD
    & (
        rules.contiguous("x", "x_residual")
        | rules.custom(lambda x, x_residual, weight, epsilon: _in_one_order(x, x_residual), _ORDER)
    ),
    traits={"batch_invariant"},
)
def fused_add_rms_norm_dynamic_per_token_quant_int8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add, normalise the sum, and quantise its rows by the scales of their largest magnitudes."""
    residual = _empty_like(x)
    out = _empty_like(x, dtype=torch.int8)
    scale = row_scales(x)
    _fused_add_per_token(out, scale, residual, x, x_residual, weight, epsilon, None)
    return out, scale, residual


@ops.silu_and_mul_static_quant_fp8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_GATED & one_float32("scale"),
    traits={"batch_invariant"},
)
def silu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Activate, multiply, and quantise by one given scale."""
    out = _half(x, torch.float8_e4m3fn)
    _silu_static(out, x, scale)
    return out


@ops.silu_and_mul_dynamic_per_token_quant_fp8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_GATED & one_float32("scale_ub"),
    traits={"batch_invariant"},
)
def silu_and_mul_dynamic_per_token_quant_fp8(
    x: Tensor, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Activate, multiply, and quantise each row by the scale of its largest magnitude."""
    out = _half(x, torch.float8_e4m3fn)
    scale = row_scales(x)
    _silu_per_token(out, scale, x, scale_ub)
    return out, scale


@ops.silu_and_mul_dynamic_per_token_quant_int8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_GATED,
    traits={"batch_invariant"},
)
def silu_and_mul_dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activate, multiply, and quantise each row by the scale of its largest magnitude."""
    out = _half(x, torch.int8)
    scale = row_scales(x)
    _silu_per_token(out, scale, x, None)
    return out, scale


@ops.silu_and_mul_per_token_group_quant_fp8.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=_GATED
    & rules.custom(lambda x, group_size, use_ue8m0=False: group_size >= 1, "group_size is below 1"),
    traits={"batch_invariant"},
)
def silu_and_mul_per_token_group_quant_fp8(
    x: Tensor, group_size: int, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Activate, multiply, and quantise each group by the scale of its largest magnitude."""
    *leading, width = x.shape
    width //= 2
    out = _empty((*leading, width), dtype=torch.float8_e4m3fn)
    scale = _empty((*leading, -(-width // group_size)), dtype=torch.float32)
    _silu_groups(out, scale, x, group_size, use_ue8m0)
    return out, scale
