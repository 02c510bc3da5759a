"""A norm or an activation and the quantization of its result, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.kernels.triton.activation import GATED
from opweave.kernels.triton.arguments import has_float8, one_float32, row_count, row_stride
from opweave.kernels.triton.launch import Kernels, launch
from opweave.kernels.triton.norm import ADD, NORM, normalize, warps_for
from opweave.kernels.triton.outputs import codes_and_scales, half_of, new_rows
from opweave.kernels.triton.quant import GROUP_SIZE, quantize_groups
from opweave.kernels.triton.registration import block_of, implements

_kernels = Kernels("activation")
_FP8 = torch.float8_e4m3fn


@implements(ops.rms_norm_static_quant_fp8, NORM & one_float32("scale") & has_float8("x"))
def rms_norm_static_quant_fp8(
    x: Tensor, weight: Tensor | None, epsilon: float, scale: Tensor
) -> Tensor:
    """Normalize the rows of *x*, and quantize them by one given scale."""
    out = new_rows(x, x.shape[-1], _FP8)
    normalize(out, x, weight, epsilon, scheme="static", scale=scale)
    return out


@implements(
    ops.rms_norm_dynamic_per_token_quant_fp8, NORM & one_float32("scale_ub") & has_float8("x")
)
def rms_norm_dynamic_per_token_quant_fp8(
    x: Tensor, weight: Tensor | None, epsilon: float, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalize the rows of *x*, and quantize each by the scale of its largest magnitude."""
    out, scales = codes_and_scales(x, x.shape[-1], _FP8)
    normalize(out, x, weight, epsilon, scheme="fp8", scales=scales, scale=scale_ub)
    return out, scales


@implements(ops.rms_norm_dynamic_per_token_quant_int8, NORM)
def rms_norm_dynamic_per_token_quant_int8(
    x: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Normalize the rows of *x*, and quantize each by the scale of its largest magnitude."""
    out, scales = codes_and_scales(x, x.shape[-1], torch.int8)
    normalize(out, x, weight, epsilon, scheme="int8", scales=scales)
    return out, scales


@implements(ops.fused_add_rms_norm_static_quant_fp8, ADD & one_float32("scale") & has_float8("x"))
def fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Add, normalize the sum, and quantize it by one given scale."""
    out, total = new_rows(x, x.shape[-1], _FP8), torch.empty_like(x)
    normalize(
        out, x, weight, epsilon, residual=x_residual, total=total, scheme="static", scale=scale
    )
    return out, total


@implements(
    ops.fused_add_rms_norm_dynamic_per_token_quant_fp8,
    ADD & one_float32("scale_ub") & has_float8("x"),
)
def fused_add_rms_norm_dynamic_per_token_quant_fp8(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    scale_ub: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add, normalize the sum, and quantize its rows by the scales of their largest magnitudes."""
    out, scales = codes_and_scales(x, x.shape[-1], _FP8)
    total = torch.empty_like(x)
    normalize(
        out,
        x,
        weight,
        epsilon,
        residual=x_residual,
        total=total,
        scheme="fp8",
        scales=scales,
        scale=scale_ub,
    )
    return out, scales, total


@implements(ops.fused_add_rms_norm_dynamic_per_token_quant_int8, ADD)
def fused_add_rms_norm_dynamic_per_token_quant_int8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add, normalize the sum, and quantize its rows by the scales of their largest magnitudes."""
    out, scales = codes_and_scales(x, x.shape[-1], torch.int8)
    total = torch.empty_like(x)
    normalize(
        out, x, weight, epsilon, residual=x_residual, total=total, scheme="int8", scales=scales
    )
    return out, scales, total


@implements(ops.silu_and_mul_static_quant_fp8, GATED & one_float32("scale") & has_float8("x"))
def silu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Activate, multiply, and quantize by one given scale."""
    out = half_of(x, _FP8)
    _silu_and_mul_quant(out, None, x, scale, "static")
    return out


@implements(
    ops.silu_and_mul_dynamic_per_token_quant_fp8, GATED & one_float32("scale_ub") & has_float8("x")
)
def silu_and_mul_dynamic_per_token_quant_fp8(
    x: Tensor, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Activate, multiply, and quantize each row by the scale of its largest magnitude."""
    out, scales = codes_and_scales(x, x.shape[-1] // 2, _FP8)
    _silu_and_mul_quant(out, scales, x, scale_ub, "fp8")
    return out, scales


@implements(ops.silu_and_mul_dynamic_per_token_quant_int8, GATED)
def silu_and_mul_dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activate, multiply, and quantize each row by the scale of its largest magnitude."""
    out, scales = codes_and_scales(x, x.shape[-1] // 2, torch.int8)
    _silu_and_mul_quant(out, scales, x, None, "int8")
    return out, scales


def _silu_and_mul_quant(
    out: Tensor, scales: Tensor | None, x: Tensor, scale: Tensor | None, scheme: str
) -> None:
    width = out.shape[-1]
    launch(
        _kernels.silu_and_mul_quant,
        (row_count(x),),
        out,
        scales,
        x,
        scale,
        row_stride(x),
        width,
        SCHEME=scheme,
        BLOCK=block_of(width),
        num_warps=warps_for(width),
    )


@implements(ops.silu_and_mul_per_token_group_quant_fp8, GATED & has_float8("x") & GROUP_SIZE)
def silu_and_mul_per_token_group_quant_fp8(
    x: Tensor, group_size: int, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Activate, multiply, and quantize every group of neighbors in a row by its own scale."""
    width = x.shape[-1] // 2
    return quantize_groups(x, width, group_size, use_ue8m0=use_ue8m0, is_gated=True)
