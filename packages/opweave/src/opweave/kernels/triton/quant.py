"""Quantization to 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.kernels.triton.arguments import has_float8, one_float32, row_count, row_stride, rows
from opweave.kernels.triton.launch import Kernels, launch
from opweave.kernels.triton.norm import warps_for
from opweave.kernels.triton.outputs import codes_and_scales, new_rows
from opweave.kernels.triton.registration import block_of, implements

_kernels = Kernels("quant")

_BLOCK = 1024
GROUP_SIZE = rules.custom(
    lambda group_size: 1 <= group_size <= 8192,
    "group_size is not between 1 and 8192",
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
        _kernels.dynamic_quant,
        (row_count(x),),
        out,
        scales,
        x,
        bound,
        row_stride(x),
        width,
        SCHEME="int8" if dtype is torch.int8 else "fp8",
        BLOCK=block_of(width),
        num_warps=warps_for(width),
    )
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
        _kernels.group_quant,
        (row_count(x), -(-count // groups)),
        out,
        scales,
        x,
        row_stride(x),
        width,
        group_size,
        count,
        IS_GATED=is_gated,
        USE_UE8M0=use_ue8m0,
        GROUPS=groups,
        BLOCK=block,
    )
    return out, scales
