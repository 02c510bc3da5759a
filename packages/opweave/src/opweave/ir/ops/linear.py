"""Linear layers: weights in the dtype of the activations, and weight-only int8 and float8.

Quantized weights follow the convention of :mod:`opweave.ir.ops.quant`: ``weight ~ q * scale``.
"""

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.registry import register_op
from opweave.ir.rule import plain


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
    _check_w8(weight, scale)
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = weight.to(y.dtype) * scale.to(y.dtype).reshape(-1, 1)
    return functional.linear(y, wide, None if bias is None else bias.to(y.dtype)).to(x.dtype)


def scales_rows(scale: Tensor, weight: Tensor) -> bool:
    """Whether *scale* has one element, or one per row of *weight*."""
    return scale.numel() == 1 or scale.shape in (weight.shape[:1], (*weight.shape[:1], 1))


def _check_w8(weight: Tensor, scale: Tensor) -> None:
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
    largest = 127.0 if weight_dtype is torch.int8 else 448.0
    scale = weight.abs().amax(dim=-1) / largest
    quantized = weight / scale[:, None]
    if weight_dtype is torch.int8:
        quantized = quantized.round()
    return x.to(dtype), quantized.to(weight_dtype), scale, bias.to(dtype)


# Sums in a different order: the error grows with the number of terms.
for _op in (linear, linear_w8a16):
    _op.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)
    _op.override_tolerance(torch.bfloat16, atol=1e-2, rtol=1.6e-2)
    _op.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)

linear.register_spelling(constants=("weight",))(linear.native)
