"""Quantization of activations to float8_e4m3fn and int8.

All ops share a convention: ``x ~ q * scale`` with a float32 scale, computed in float32. Values are
clamped before the cast, so that they saturate on every device; the cast rounds to nearest even.
"""

import math

import torch
from torch import Tensor

from opweave.ir.ops.arguments import inputs_from_rows, random_rows
from opweave.ir.registry import register_op
from opweave.ir.rules import BATCH_INVARIANT, ROWWISE

FP8_MAX = 448.0
"""The largest float8_e4m3fn."""

FP8_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
"""The minimum of computed scales, which avoids division by zero for rows of zeros."""

INT8_MAX = 127.0
INT8_MIN_SCALE = torch.finfo(torch.float32).eps
"""The minimum of computed scales, as in torch's quantization observers."""


@register_op(native_traits={BATCH_INVARIANT})
def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize to float8_e4m3fn with given scales: ``cast(clamp(x * (1 / scale), -448, 448))``.

    Args:
        x: ``(..., n)``, floating point; the leading dimensions count as one of size ``m``.
        scale: one element of any shape for all of ``x``; or ``(a, b)`` where ``a`` divides ``m``
            and ``b`` divides ``n``: each scale covers a block of ``m / a`` rows and ``n / b``
            columns. ``(m, 1)`` is one scale per token, ``(1, n)`` one per channel, and
            ``(m, n / g)`` one per group of ``g`` columns.

    Returns:
        float8_e4m3fn in the shape of ``x``. NaN stays NaN.

    Raises:
        ValueError: the shape of ``scale`` does not fit.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
    """
    return _to_fp8(x.to(torch.float32) * _inverse_scales(x, scale, "static_quant_fp8"))


@register_op
def dynamic_per_tensor_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to float8_e4m3fn with one scale, ``max(amax(|x|) / 448, FP8_MIN_SCALE)``.

    Args:
        x: floating point, any shape.

    Returns:
        ``static_quant_fp8(x, scale)``, and the scale: float32 ``(1,)``.

    Source: arXiv:2209.05433.
    """
    largest = x.abs().amax() if x.numel() else x.new_zeros(())
    scale = _fp8_scale(largest.to(torch.float32)).reshape(1)
    return static_quant_fp8(x, scale), scale


@register_op(native_traits={BATCH_INVARIANT, ROWWISE})
def dynamic_per_token_quant_fp8(x: Tensor, scale_ub: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize to float8_e4m3fn with one scale per row.

    ``scale = max(min(amax(|row|), scale_ub) / 448, FP8_MIN_SCALE)``, then
    ``cast(clamp(x * (1 / scale), -448, 448))``.

    Args:
        x: ``(..., n)``, floating point.
        scale_ub: one float32: upper bound of the magnitude that determines a scale.

    Returns:
        float8_e4m3fn in the shape of ``x``, and the scales: float32 ``(..., 1)``, contiguous.

    Raises:
        ValueError: ``x`` is 0-d, or ``scale_ub`` has more than one element.

    Source: arXiv:2209.05433; the bound is that of FBGEMM's row-wise quantization.
    """
    largest = _largest_of_rows(x, "dynamic_per_token_quant_fp8")
    if scale_ub is not None:
        if scale_ub.numel() != 1:
            raise ValueError(
                "dynamic_per_token_quant_fp8: scale_ub must have one element; found shape "
                f"{tuple(scale_ub.shape)}."
            )
        largest = torch.minimum(largest, scale_ub.to(torch.float32).reshape(()))
    scale = _fp8_scale(largest)
    return _to_fp8(x.to(torch.float32) * scale.reciprocal()), scale


@register_op(native_traits={BATCH_INVARIANT, ROWWISE})
def per_token_group_quant_fp8(
    x: Tensor, group_size: int, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize to float8_e4m3fn with one scale per group of neighbors in a row.

    ``scale = max(amax(|group|) / 448, FP8_MIN_SCALE)``, then ``cast(clamp(x / scale, -448, 448))``.

    Args:
        x: ``(..., n)``, floating point.
        group_size: elements per group; the last group of a row may be shorter.
        use_ue8m0: round the scale up to a power of two, as the 8-bit exponent format needs.

    Returns:
        float8_e4m3fn in the shape of ``x``, and the scales: float32
        ``(..., ceil(n / group_size))``; both contiguous.

    Raises:
        ValueError: ``x`` is 0-d, or ``group_size`` is less than 1.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3; OCP Microscaling Formats (MX) for E8M0.
    """
    if group_size < 1 or x.ndim == 0:
        raise ValueError(
            "per_token_group_quant_fp8: x must have a last dimension and group_size must be at "
            f"least 1; found x of shape {tuple(x.shape)}, group_size={group_size}."
        )
    wide = x.to(torch.float32).contiguous()
    whole = x.shape[-1] // group_size * group_size
    if whole == x.shape[-1]:
        return _by_groups(wide, group_size, use_ue8m0)
    # Quantize the shorter last group separately: if rows are padded to whole groups and cut again,
    # Inductor's C++ code drops it (pytorch issue 195582).
    codes, scales = _by_groups(wide[..., :whole].contiguous(), group_size, use_ue8m0)
    last, scale = _by_groups(wide[..., whole:].contiguous(), x.shape[-1] - whole, use_ue8m0)
    joined = torch.cat((codes.view(torch.uint8), last.view(torch.uint8)), dim=-1)
    return joined.view(torch.float8_e4m3fn), torch.cat((scales, scale), dim=-1)


def _by_groups(x: Tensor, group_size: int, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Return the codes and scales; *group_size* divides the last dimension of *x*."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    scale = _fp8_scale(blocks.abs().amax(dim=-1))
    if use_ue8m0:
        scale = _rounded_up_to_power_of_two(scale)
    return _to_fp8(blocks / scale.unsqueeze(-1)).reshape(x.shape), scale


@register_op(native_traits={BATCH_INVARIANT})
def static_quant_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize to int8 with given scales: ``cast(clamp(round(x * (1 / scale)), -128, 127))``.

    Symmetric (zero point 0). Rounds half to even; NaN becomes 0.

    Args:
        x: ``(..., n)``, floating point.
        scale: as in :func:`static_quant_fp8`.

    Returns:
        int8 in the shape of ``x``.

    Raises:
        ValueError: the shape of ``scale`` does not fit.

    Source: Jacob et al., arXiv:1712.05877; multiplies by the reciprocal, as torch's
    ``quantize_per_tensor``.
    """
    return _to_int8(x.to(torch.float32) * _inverse_scales(x, scale, "static_quant_int8"))


@register_op(native_traits={BATCH_INVARIANT, ROWWISE})
def dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to int8 with one scale per row, ``max(amax(|row|) / 127, INT8_MIN_SCALE)``.

    Symmetric, as :func:`static_quant_int8`; a row with a NaN becomes zeros with a NaN scale.

    Args:
        x: ``(..., n)``, floating point.

    Returns:
        int8 in the shape of ``x``, and the scales: float32 ``(..., 1)``, contiguous.

    Raises:
        ValueError: ``x`` is 0-d.

    Source: arXiv:1712.05877; LLM.int8(), arXiv:2208.07339, for one scale per row.
    """
    largest = _largest_of_rows(x, "dynamic_per_token_quant_int8")
    scale = (largest / INT8_MAX).clamp(min=INT8_MIN_SCALE)
    return _to_int8(x.to(torch.float32) * scale.reciprocal()), scale


def scale_covers(scale: Tensor, x: Tensor) -> bool:
    """Whether *scale* has one element, or one for each of equal blocks of *x*."""
    if scale.numel() == 1:
        return True
    if scale.ndim != 2 or x.ndim == 0:
        return False
    rows, columns = scale.shape
    return _divides(rows, math.prod(x.shape[:-1])) and _divides(columns, x.shape[-1])


def _divides(part: int, whole: int) -> bool:
    return whole % part == 0 if part else whole == 0


def _to_fp8(values: Tensor) -> Tensor:
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _to_int8(values: Tensor) -> Tensor:
    # The result of casting NaN to an integer depends on the device.
    return values.round().clamp(-INT8_MAX - 1, INT8_MAX).nan_to_num(nan=0.0).to(torch.int8)


def _fp8_scale(largest: Tensor) -> Tensor:
    return (largest / FP8_MAX).clamp(min=FP8_MIN_SCALE)


def _largest_of_rows(x: Tensor, name: str) -> Tensor:
    """Return the largest magnitude of each row, float32 ``(..., 1)``; 0 for an empty row."""
    if x.ndim == 0:
        raise ValueError(f"{name}: x must have at least one dimension; found a 0-d tensor.")
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32)
    return x.abs().amax(dim=-1, keepdim=True).to(torch.float32).contiguous()


def _rounded_up_to_power_of_two(scale: Tensor) -> Tensor:
    # Adding the mantissa mask to the bits carries any nonzero mantissa into the exponent: exact.
    # With log2, a scale 1 ulp above a power of two would be rounded down.
    bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isnan(), scale, bits.view(torch.float32))


def _inverse_scales(x: Tensor, scale: Tensor, name: str) -> Tensor:
    """Return ``1 / scale`` in a shape that multiplies *x*."""
    inverse = scale.to(torch.float32).reciprocal()
    if scale.numel() == 1:
        return inverse.reshape(())
    if not scale_covers(scale, x):
        raise ValueError(
            f"{name}: scale must have one element, or shape (a, b) where a divides the rows of x "
            "and b its last dimension, such as (tokens, 1) for one scale per token; x has shape "
            f"{tuple(x.shape)}, scale {tuple(scale.shape)}."
        )
    rows = math.prod(x.shape[:-1])
    for dim, size in enumerate((rows, x.shape[-1])):
        if scale.shape[dim] not in (1, size):
            inverse = inverse.repeat_interleave(size // scale.shape[dim], dim)
    if inverse.shape[0] == 1:
        return inverse.reshape(inverse.shape[1])
    return inverse.reshape(*x.shape[:-1], inverse.shape[1])


@static_quant_fp8.register_input_generator
@static_quant_int8.register_input_generator
def _static_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    row_block_size: int = 0,
    column_block_size: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    """One scale for each block of so many rows and columns; 0 is all of them."""
    x = random_rows(num_tokens, hidden_size, dtype, device)
    return x, block_scales(x, row_block_size, column_block_size)


def block_scales(x: Tensor, row_block_size: int, column_block_size: int) -> Tensor:
    """Return random scales for :func:`static_quant_fp8`; 0.02 without block sizes."""
    if not row_block_size and not column_block_size:
        return torch.full((1,), 0.02, device=x.device)
    sizes = zip(x.shape, (row_block_size, column_block_size), strict=True)
    counts = [size // block if block else 1 for size, block in sizes]
    return 0.01 + 0.03 * torch.rand(counts, device=x.device)


@dynamic_per_tensor_quant_fp8.register_input_generator
@dynamic_per_token_quant_int8.register_input_generator
@inputs_from_rows
def _dynamic_inputs(x: Tensor) -> tuple[Tensor]:
    return (x,)


@dynamic_per_token_quant_fp8.register_input_generator
@inputs_from_rows
def _dynamic_fp8_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.full((1,), 3.0, device=x.device)


@per_token_group_quant_fp8.register_input_generator
def _group_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    group_size: int = 24,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, int, bool]:
    return random_rows(num_tokens, hidden_size, dtype, device), group_size, False


for _op in (
    static_quant_fp8,
    dynamic_per_tensor_quant_fp8,
    dynamic_per_token_quant_fp8,
    per_token_group_quant_fp8,
):
    # A kernel may divide instead of multiplying by the reciprocal, which may give the neighboring
    # code, up to 1/8 of the value (or 2**-9) away.
    _op.override_tolerance(torch.float8_e4m3fn, atol=2**-9, rtol=0.125)
