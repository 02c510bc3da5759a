"""Kernels of rows: norms, activations and quantization."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels.triton.launch import (
    Kernels,
    block_of,
    codes_and_scales,
    half_of,
    has_float8,
    implements,
    launch,
    new_rows,
    on_device,
    one_float32,
    row_count,
    row_stride,
    rows,
)

# Gated activations.


_kernels = Kernels("rows")

GATED = rows("x") & rules.last_dim_multiple_of("x", 2)
_BLOCK = 1024


@implements(ops.silu_and_mul, GATED)
def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(x1) * x2`` for the halves of the last dimension of *x*."""
    return _act_and_mul(x, "silu")


@implements(ops.mul_and_silu, GATED)
def mul_and_silu(x: Tensor) -> Tensor:
    """Return ``x1 * silu(x2)`` for the halves of the last dimension of *x*."""
    return _act_and_mul(x, "silu", second=True)


@implements(ops.gelu_and_mul, GATED & rules.one_of("approximate", "none", "tanh"))
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(x1) * x2`` for the halves of the last dimension of *x*."""
    return _act_and_mul(x, "gelu" if approximate == "none" else "gelu_tanh")


def _act_and_mul(x: Tensor, kind: str, *, second: bool = False) -> Tensor:
    out = half_of(x)
    width = out.shape[-1]
    grid = (row_count(x), -(-width // _BLOCK))
    constants = {"KIND": kind, "SECOND": second, "BLOCK": _BLOCK}
    launch(_kernels.act_and_mul, grid, out, x, row_stride(x), width, **constants)
    return out


# RMS norms, optionally fused with the quantization of the result.


WEIGHT = on_device("weight") & rules.per_last_dim("weight", "x") & rules.contiguous("weight")
NORM = rows("x") & WEIGHT & (rules.same_dtype("x", "weight") | rules.dtype("weight", torch.float32))
ADD = (
    NORM
    & rows("x_residual")
    & rules.same_dtype("x", "x_residual")
    & rules.same_shape("x", "x_residual")
)


def normalize(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    epsilon: float,
    *,
    residual: Tensor | None = None,
    scheme: str | None = None,
    scales: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Normalize the rows of *x* into *out*.

    With *residual*, normalize ``x + residual`` instead.

    Args:
        out: has the shape of *x*, and its dtype or that of the quantized codes.
        scheme, scales, scale: see ``store_quantized``.

    Returns:
        The tensor that was normalized.
    """
    width = x.shape[-1]
    total = None if residual is None else torch.empty_like(x)
    strides = [0 if t is None else row_stride(t) for t in (out, total, x, residual)]
    launch(
        _kernels.rms_norm, (row_count(x),),
        out, scales, total, x, residual, weight, scale,
        *strides,
        width, epsilon,
        SCHEME=scheme, BLOCK=block_of(width),
        num_warps=warps_for(width),
    )  # fmt: skip
    return x if total is None else total


def warps_for(width: int) -> int:
    """Return the number of warps per row: 8 to 16 elements per lane, at most 1,024 lanes.

    >>> [warps_for(width) for width in (64, 1024, 4096, 65536)]
    [1, 2, 8, 32]
    """
    return min(max(block_of(width) // 512, 1), 32)


@implements(ops.rms_norm, NORM & rules.is_none("variance_size"))
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Normalize the rows of *x*, ``(..., h)``, into a new tensor."""
    out = torch.empty_like(x)
    normalize(out, x, weight, epsilon)
    return out


@implements(ops.fused_add_rms_norm, ADD & rules.is_none("variance_size"))
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Add *x* and *x_residual*, both ``(..., h)``, and normalize the sum, in one pass."""
    out = torch.empty_like(x)
    return out, normalize(out, x, weight, epsilon, residual=x_residual)


# Quantization to 8 bits.


GROUP_SIZE = rules.custom(
    lambda group_size: 1 <= group_size <= 8192, "group_size is not between 1 and 8192"
)


@implements(ops.static_quant_fp8, rows("x") & one_float32("scale") & has_float8("x"))
def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize *x* by one given scale into a new float8_e4m3fn tensor."""
    return _static_quant(x, scale, torch.float8_e4m3fn)


@implements(ops.static_quant_int8, rows("x") & one_float32("scale"))
def static_quant_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize *x* by one given scale into a new int8 tensor."""
    return _static_quant(x, scale, torch.int8)


def _static_quant(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    width = x.shape[-1]
    out = new_rows(x, width, dtype)
    grid = (row_count(x), -(-width // _BLOCK))
    constants = {"IS_INT8": dtype is torch.int8, "BLOCK": _BLOCK}
    launch(_kernels.static_quant, grid, out, x, scale, row_stride(x), width, **constants)
    return out


@implements(ops.dynamic_per_token_quant_fp8, rows("x") & one_float32("scale_ub") & has_float8("x"))
def dynamic_per_token_quant_fp8(x: Tensor, scale_ub: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize every row of *x* by the scale of its largest magnitude."""
    return _dynamic_quant(x, scale_ub, torch.float8_e4m3fn)


@implements(ops.dynamic_per_token_quant_int8, rows("x"))
def dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize every row of *x* by the scale of its largest magnitude."""
    return _dynamic_quant(x, None, torch.int8)


def _dynamic_quant(x: Tensor, bound: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    out, scales = codes_and_scales(x, width, dtype)
    launch(
        _kernels.dynamic_quant, (row_count(x),),
        out, scales, x, bound,
        row_stride(x),
        width,
        SCHEME="int8" if dtype is torch.int8 else "fp8", BLOCK=block_of(width),
        num_warps=warps_for(width),
    )  # fmt: skip
    return out, scales


@implements(ops.per_token_group_quant_fp8, rows("x") & has_float8("x") & GROUP_SIZE)
def per_token_group_quant_fp8(
    x: Tensor, group_size: int, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize every group of neighbors in a row of *x* by the scale of its largest magnitude."""
    return quantize_groups(x, x.shape[-1], group_size, use_ue8m0=use_ue8m0, is_gated=False)


def quantize_groups(
    x: Tensor, width: int, group_size: int, *, use_ue8m0: bool, is_gated: bool
) -> tuple[Tensor, Tensor]:
    """Quantize *x*, or ``silu_and_mul(x)`` if *is_gated*, to ``(..., width)`` codes by groups."""
    count = -(-width // group_size)
    out, scales = codes_and_scales(x, width, torch.float8_e4m3fn, count)
    block = block_of(group_size)
    groups = min(max(1024 // block, 1), block_of(count))
    launch(
        _kernels.group_quant, (row_count(x), -(-count // groups)),
        out, scales, x,
        row_stride(x),
        width, group_size, count,
        IS_GATED=is_gated, USE_UE8M0=use_ue8m0, GROUPS=groups, BLOCK=block,
    )  # fmt: skip
    return out, scales


# A norm or an activation and the quantization of its result, in one kernel.


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
    out = new_rows(x, x.shape[-1], _FP8)
    total = normalize(out, x, weight, epsilon, residual=x_residual, scheme="static", scale=scale)
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
    total = normalize(
        out, x, weight, epsilon, residual=x_residual, scheme="fp8", scales=scales, scale=scale_ub
    )
    return out, scales, total


@implements(ops.fused_add_rms_norm_dynamic_per_token_quant_int8, ADD)
def fused_add_rms_norm_dynamic_per_token_quant_int8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add, normalize the sum, and quantize its rows by the scales of their largest magnitudes."""
    out, scales = codes_and_scales(x, x.shape[-1], torch.int8)
    total = normalize(out, x, weight, epsilon, residual=x_residual, scheme="int8", scales=scales)
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
        _kernels.silu_and_mul_quant, (row_count(x),),
        out, scales, x, scale,
        row_stride(x),
        width,
        SCHEME=scheme, BLOCK=block_of(width),
        num_warps=warps_for(width),
    )  # fmt: skip


@implements(ops.silu_and_mul_per_token_group_quant_fp8, GATED & has_float8("x") & GROUP_SIZE)
def silu_and_mul_per_token_group_quant_fp8(
    x: Tensor, group_size: int, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Activate, multiply, and quantize every group of neighbors in a row by its own scale."""
    width = x.shape[-1] // 2
    return quantize_groups(x, width, group_size, use_ue8m0=use_ue8m0, is_gated=True)
