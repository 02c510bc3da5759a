"""Linear layers, with weights and activations of 8 bits too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.ops import quant
from opweave.ir.ops.arguments import misfit
from opweave.ir.registry import register_op
from opweave.ir.rules import plain

# Linear layers: weights in the dtype of the activations, and weight-only int8 and float8.
#
# Quantized weights follow the convention of :mod:`opweave.ir.ops.quant`: ``weight ~ q * scale``.


@register_op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: ``(..., in_features)``.
        weight: ``(out_features, in_features)``, the dtype of ``x``.
        bias: ``(out_features,)`` or None.

    Returns:
        ``(..., out_features)`` in the dtype of ``x``.
    """
    return functional.linear(x, weight, bias)


@register_op(autocast=False)
def linear_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ (weight * scale).T + bias`` with 8-bit weights, in float32, rounded once.

    Args:
        x: ``(..., in_features)``, floating point; float64 is computed in float64.
        weight: ``(out_features, in_features)``, int8 or float8_e4m3fn.
        scale: float32; one element of any shape, or one per row of ``weight``: ``(out_features,)``
            or ``(out_features, 1)``.
        bias: ``(out_features,)``, any floating dtype, or None.

    Returns:
        ``(..., out_features)`` in the dtype of ``x``.

    Raises:
        ValueError: the dtype of ``weight`` or the shape of ``scale`` is not supported.

    Source: LLM.int8(), arXiv:2208.07339, for one scale per row; arXiv:2209.05433 for float8.
    """
    if weight.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(
            "linear_w8a16: weight must be int8 or float8_e4m3fn; found "
            f"{plain(weight.dtype)}. For weights in the dtype of x, use linear."
        )
    if not scales_rows(scale, weight):
        raise ValueError(
            "linear_w8a16: scale must have one element, or shape (out_features,) or "
            f"(out_features, 1); weight has shape {tuple(weight.shape)}, scale "
            f"{tuple(scale.shape)}."
        )
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = weight.to(y.dtype) * scale.to(y.dtype).reshape(-1, 1)
    return functional.linear(y, wide, None if bias is None else bias.to(y.dtype)).to(x.dtype)


def scales_rows(scale: Tensor, weight: Tensor) -> bool:
    """Whether *scale* has one element, or one per row of *weight*."""
    return scale.numel() == 1 or scale.shape in (weight.shape[:1], (*weight.shape[:1], 1))


@linear.register_input_generator
def _linear_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    output_size: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """An *output_size* of 0 stands for twice the *hidden_size*."""
    output_size = output_size or 2 * hidden_size
    x = torch.randn(num_tokens, hidden_size, device=device)
    weight = torch.randn(output_size, hidden_size, device=device) / hidden_size**0.5
    bias = torch.randn(output_size, device=device)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@linear_w8a16.register_input_generator
def _linear_w8a16_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    output_size: int = 0,
    weight_dtype: torch.dtype = torch.int8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, bias = _linear_inputs(num_tokens, hidden_size, output_size, torch.float32, device)
    return x.to(dtype), *_quantized_rows(weight, weight_dtype), bias.to(dtype)


def _quantized_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize *weight* to 8 bits with one scale per row; return the codes and the scales."""
    is_int = dtype is torch.int8
    scale = weight.abs().amax(dim=-1) / (quant.INT8_MAX if is_int else quant.FP8_MAX)
    quantized = weight / scale[:, None]
    return (quantized.round() if is_int else quantized).to(dtype), scale


# Sums in a different order: the error grows with the number of terms.
for _op in (linear, linear_w8a16):
    _op.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)
    _op.override_tolerance(torch.bfloat16, atol=1e-2, rtol=1.6e-2)
    _op.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)

linear.register_spelling(constants=("weight",))(linear.native)


# Linear layer with weights and activations of 8 bits.
#
# Both follow the convention of :mod:`opweave.ir.ops.quant`, whose ops quantize the activations.


_DTYPES = (torch.int8, torch.float8_e4m3fn)
_SCALES = (torch.float32, torch.float64)


@register_op(autocast=False)
def linear_w8a8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``(x * x_scale) @ (weight * scale).T + bias`` with 8-bit ``x``, in float32, rounded once.

    A scale or ``out_dtype`` of float64 is computed in float64.

    Args:
        x: ``(..., in_features)``, int8 or float8_e4m3fn.
        x_scale: float32; one element of any shape, or ``(..., groups)``: one per token, or one per
            group of columns of a token, where ``groups`` divides ``in_features``.
        weight: ``(out_features, in_features)``, the dtype of ``x``.
        scale: float32; one element of any shape; ``(out_features,)``; or ``(a, b)`` where ``a``
            divides ``out_features`` and ``b`` divides ``in_features``: one for each block of
            ``out_features / a`` rows and ``in_features / b`` columns.
        bias: ``(out_features,)``, any floating dtype, or None.
        out_dtype: floating point.

    Returns:
        ``(..., out_features)`` in ``out_dtype``.

    Raises:
        ValueError: a dtype, or the shape of a scale, is not supported.

    Source: SmoothQuant, arXiv:2211.10438, for int8 with one scale per token and per row;
    DeepSeek-V3, arXiv:2412.19437, section 3.3, for float8 with groups of 128 and blocks of 128x128.
    """
    op = "linear_w8a8"
    if x.dtype not in _DTYPES or x.ndim == 0:
        raise misfit(op, "x", x, "int8 or float8_e4m3fn, (..., in_features)")
    if weight.dtype != x.dtype or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        expected = f"like x, {plain(x.dtype)} (out_features, {x.shape[-1]})"
        raise misfit(op, "weight", weight, expected)
    if x_scale.dtype not in _SCALES or not scales_tokens(x_scale, x):
        shape = tuple(x.shape)
        expected = f"float32 with one element, or (..., groups) for equal groups of x {shape}"
        raise misfit(op, "x_scale", x_scale, expected)
    if scale.dtype not in _SCALES or not scales_weight(scale, weight):
        shape = tuple(weight.shape)
        expected = f"float32 with one element, (out_features,), or (a, b) that divides {shape}"
        raise misfit(op, "scale", scale, expected)
    if not out_dtype.is_floating_point or out_dtype.itemsize == 1:
        raise ValueError(
            f"{op}: out_dtype must be floating point of 16 bits or more; found {plain(out_dtype)}."
        )
    dtype = torch.promote_types(out_dtype, scale.dtype)
    y = x.to(dtype) * spread_token_scales(x_scale, x).to(dtype)
    wide = weight.to(dtype) * spread_weight_scales(scale, weight).to(dtype)
    return functional.linear(y, wide, None if bias is None else bias.to(dtype)).to(out_dtype)


def spread_token_scales(x_scale: Tensor, x: Tensor) -> Tensor:
    """Return *x_scale* in a shape that multiplies *x*."""
    if x_scale.ndim != x.ndim:
        return x_scale.reshape(())
    return _repeated(x_scale, -1, x.shape[-1])


def spread_weight_scales(scale: Tensor, weight: Tensor) -> Tensor:
    """Return *scale* in a shape that multiplies *weight*."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.ndim == 1:
        return scale[:, None]
    return _repeated(_repeated(scale, 0, weight.shape[0]), 1, weight.shape[1])


def _repeated(scale: Tensor, dim: int, size: int) -> Tensor:
    count = scale.shape[dim]
    return scale if count in (1, size) else scale.repeat_interleave(size // count, dim)


def scales_tokens(x_scale: Tensor, x: Tensor) -> bool:
    """Whether *x_scale* has one element, or one for each of equal groups of each row of *x*."""
    if x_scale.ndim != x.ndim or x.ndim == 0:
        return x_scale.numel() == 1
    fits = x_scale.shape[:-1] == x.shape[:-1] and x_scale.shape[-1] > 0
    return (fits and x.shape[-1] % x_scale.shape[-1] == 0) or x_scale.numel() == 1


def scales_weight(scale: Tensor, weight: Tensor) -> bool:
    """Whether *scale* has one element, or one for each row or each of equal blocks of *weight*."""
    return scale.shape == weight.shape[:1] or quant.scale_covers(scale, weight)


@linear_w8a8.register_input_generator
def _linear_w8a8_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    output_size: int = 0,
    block_size: int = 0,
    weight_dtype: torch.dtype = torch.int8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, torch.dtype]:
    """A *block_size*, for float8 only, must divide both sizes; 0: one scale per row."""
    x, weight, bias = linear.generate_inputs(
        num_tokens=num_tokens, hidden_size=hidden_size, output_size=output_size, device=device
    )
    rest = bias.to(dtype), dtype
    if block_size:
        if weight.shape[0] % block_size or weight.shape[1] % block_size:
            raise ValueError(f"linear_w8a8: {tuple(weight.shape)} is not blocks of {block_size}.")
        codes, x_scale = quant.per_token_group_quant_fp8.native(x, block_size)
        blocks = weight.unflatten(1, (-1, block_size)).unflatten(0, (-1, block_size))
        scale = blocks.abs().amax((1, 3)) / quant.FP8_MAX
        quantized = weight / spread_weight_scales(scale, weight)
        return codes, x_scale, quantized.to(torch.float8_e4m3fn), scale, *rest
    is_int = weight_dtype is torch.int8
    quantize = quant.dynamic_per_token_quant_int8 if is_int else quant.dynamic_per_token_quant_fp8
    codes, x_scale = quantize.native(x)
    return codes, x_scale, *_quantized_rows(weight, weight_dtype), *rest


# Sums in a different order, as for linear.
linear_w8a8.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)
linear_w8a8.override_tolerance(torch.bfloat16, atol=1e-2, rtol=1.6e-2)
linear_w8a8.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)
