"""Composites of a norm or activation and the quantization of its result.

The intermediate result is rounded to the dtype of ``x`` before it is quantized. There is one op per
scheme of :mod:`opweave.ir.ops.quant`. They are batch invariant, because a required trait applies to
the ops that they call too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opweave.ir.ops import quant
from opweave.ir.ops.activation import silu_and_mul
from opweave.ir.ops.arguments import random_row, random_rows
from opweave.ir.ops.norm import fused_add_rms_norm, rms_norm
from opweave.ir.registry import IrOp, register_op
from opweave.ir.rules import BATCH_INVARIANT, ROWWISE


@register_op(composite=True, native_traits={BATCH_INVARIANT})
def rms_norm_static_quant_fp8(
    x: Tensor, weight: Tensor | None, epsilon: float, scale: Tensor
) -> Tensor:
    """``static_quant_fp8(rms_norm(x, weight, epsilon), scale)``.

    Args:
        x: ``(..., n)``, floating point.
        weight, epsilon: as in ``rms_norm``.
        scale: as in ``static_quant_fp8``.

    Returns:
        float8_e4m3fn in the shape of ``x``.

    Raises:
        ValueError: ``scale`` has another shape.
    """
    quantized: Tensor = quant.static_quant_fp8(rms_norm(x, weight, epsilon), scale)
    return quantized


@register_op(composite=True, native_traits={BATCH_INVARIANT, ROWWISE})
def rms_norm_dynamic_per_token_quant_fp8(
    x: Tensor, weight: Tensor | None, epsilon: float, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``dynamic_per_token_quant_fp8(rms_norm(x, weight, epsilon), scale_ub)``.

    Args:
        x: ``(..., n)``, floating point.
        weight, epsilon: as in ``rms_norm``.
        scale_ub: as in ``dynamic_per_token_quant_fp8``.

    Returns:
        float8_e4m3fn in the shape of ``x``, and the scales: float32 ``(..., 1)``.
    """
    quantized, scale = quant.dynamic_per_token_quant_fp8(rms_norm(x, weight, epsilon), scale_ub)
    return quantized, scale


@register_op(composite=True, native_traits={BATCH_INVARIANT, ROWWISE})
def rms_norm_dynamic_per_token_quant_int8(
    x: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """``dynamic_per_token_quant_int8(rms_norm(x, weight, epsilon))``.

    Args:
        x: ``(..., n)``, floating point.
        weight, epsilon: as in ``rms_norm``.

    Returns:
        int8 in the shape of ``x``, and the scales: float32 ``(..., 1)``.
    """
    quantized, scale = quant.dynamic_per_token_quant_int8(rms_norm(x, weight, epsilon))
    return quantized, scale


@register_op(composite=True, native_traits={BATCH_INVARIANT})
def fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """``s = x + x_residual``; ``(static_quant_fp8(rms_norm(s, weight, epsilon), scale), s)``.

    Args:
        x: ``(..., n)``, floating point.
        x_residual: the shape and dtype of ``x``.
        weight, epsilon: as in ``rms_norm``.
        scale: as in ``static_quant_fp8``.

    Returns:
        float8_e4m3fn in the shape of ``x``, and the sum in the dtype of ``x``.

    Raises:
        ValueError: ``scale`` has another shape.
    """
    y, residual = fused_add_rms_norm(x, x_residual, weight, epsilon)
    return quant.static_quant_fp8(y, scale), residual


@register_op(composite=True, native_traits={BATCH_INVARIANT, ROWWISE})
def fused_add_rms_norm_dynamic_per_token_quant_fp8(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    scale_ub: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``s = x + x_residual``; ``(*dynamic_per_token_quant_fp8(rms_norm(s, ...), scale_ub), s)``.

    Args:
        x: ``(..., n)``, floating point.
        x_residual: the shape and dtype of ``x``.
        weight, epsilon: as in ``rms_norm``.
        scale_ub: as in ``dynamic_per_token_quant_fp8``.

    Returns:
        float8_e4m3fn in the shape of ``x``, the scales: float32 ``(..., 1)``, and the sum in the
        dtype of ``x``.
    """
    y, residual = fused_add_rms_norm(x, x_residual, weight, epsilon)
    quantized, scale = quant.dynamic_per_token_quant_fp8(y, scale_ub)
    return quantized, scale, residual


@register_op(composite=True, native_traits={BATCH_INVARIANT, ROWWISE})
def fused_add_rms_norm_dynamic_per_token_quant_int8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``s = x + x_residual``; ``(*dynamic_per_token_quant_int8(rms_norm(s, ...)), s)``.

    Args:
        x: ``(..., n)``, floating point.
        x_residual: the shape and dtype of ``x``.
        weight, epsilon: as in ``rms_norm``.

    Returns:
        int8 in the shape of ``x``, the scales: float32 ``(..., 1)``, and the sum in the dtype of
        ``x``.
    """
    y, residual = fused_add_rms_norm(x, x_residual, weight, epsilon)
    quantized, scale = quant.dynamic_per_token_quant_int8(y)
    return quantized, scale, residual


@register_op(composite=True, native_traits={BATCH_INVARIANT})
def silu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """``static_quant_fp8(silu_and_mul(x), scale)``.

    Args:
        x: ``(..., 2 * d)``, floating point.
        scale: as in ``static_quant_fp8`` for ``(..., d)``.

    Returns:
        float8_e4m3fn ``(..., d)``.

    Raises:
        ValueError: the last dimension is odd, or ``scale`` has another shape.
    """
    quantized: Tensor = quant.static_quant_fp8(silu_and_mul(x), scale)
    return quantized


@register_op(composite=True, native_traits={BATCH_INVARIANT, ROWWISE})
def silu_and_mul_dynamic_per_token_quant_fp8(
    x: Tensor, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``dynamic_per_token_quant_fp8(silu_and_mul(x), scale_ub)``.

    Args:
        x: ``(..., 2 * d)``, floating point.
        scale_ub: as in ``dynamic_per_token_quant_fp8``.

    Returns:
        float8_e4m3fn ``(..., d)``, and the scales: float32 ``(..., 1)``.

    Raises:
        ValueError: the last dimension is odd.
    """
    quantized, scale = quant.dynamic_per_token_quant_fp8(silu_and_mul(x), scale_ub)
    return quantized, scale


@register_op(composite=True, native_traits={BATCH_INVARIANT, ROWWISE})
def silu_and_mul_dynamic_per_token_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """``dynamic_per_token_quant_int8(silu_and_mul(x))``.

    Args:
        x: ``(..., 2 * d)``, floating point.

    Returns:
        int8 ``(..., d)``, and the scales: float32 ``(..., 1)``.

    Raises:
        ValueError: the last dimension is odd.
    """
    quantized, scale = quant.dynamic_per_token_quant_int8(silu_and_mul(x))
    return quantized, scale


@register_op(composite=True, native_traits={BATCH_INVARIANT, ROWWISE})
def silu_and_mul_per_token_group_quant_fp8(
    x: Tensor, group_size: int, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """``per_token_group_quant_fp8(silu_and_mul(x), group_size, use_ue8m0)``.

    Args:
        x: ``(..., 2 * d)``, floating point.
        group_size, use_ue8m0: as in ``per_token_group_quant_fp8``.

    Returns:
        float8_e4m3fn ``(..., d)``, and the scales: float32 ``(..., ceil(d / group_size))``; both
        contiguous.

    Raises:
        ValueError: the last dimension is odd, or ``group_size`` is less than 1.
    """
    quantized, scale = quant.per_token_group_quant_fp8(silu_and_mul(x), group_size, use_ue8m0)
    return quantized, scale


def _arguments(
    op: IrOp, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: str
) -> list[Any]:
    """Return the arguments of *op* before those of the quantization."""
    width = 2 * hidden_size if op.name.startswith("silu") else hidden_size
    arguments: list[Any] = [random_rows(num_tokens, width, dtype, device) for _ in op.activations]
    if "weight" in op.schema.names:
        arguments += [random_row(arguments[0]), 1e-6]
    return arguments


def _static_inputs(op: IrOp) -> Callable[..., tuple[Any, ...]]:
    """Return an input generator with one scale, or one for each block of rows and columns."""

    def inputs(
        num_tokens: int = 8,
        hidden_size: int = 64,
        row_block_size: int = 0,
        column_block_size: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> tuple[Any, ...]:
        arguments = _arguments(op, num_tokens, hidden_size, dtype, device)
        quantized = arguments[0][:, :hidden_size]
        return *arguments, quant.block_scales(quantized, row_block_size, column_block_size)

    return inputs


def _dynamic_inputs(op: IrOp) -> Callable[..., tuple[Any, ...]]:
    """Return an input generator with an upper bound, where the op has one."""

    def inputs(
        num_tokens: int = 8,
        hidden_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> tuple[Any, ...]:
        bound = [torch.full((1,), 3.0, device=device)] if "scale_ub" in op.schema.names else []
        return *_arguments(op, num_tokens, hidden_size, dtype, device), *bound

    return inputs


@silu_and_mul_per_token_group_quant_fp8.register_input_generator
def _group_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    group_size: int = 24,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, int, bool]:
    return random_rows(num_tokens, 2 * hidden_size, dtype, device), group_size, False


_STATIC_OPS = (
    rms_norm_static_quant_fp8,
    fused_add_rms_norm_static_quant_fp8,
    silu_and_mul_static_quant_fp8,
)
_DYNAMIC_OPS = (
    rms_norm_dynamic_per_token_quant_fp8,
    rms_norm_dynamic_per_token_quant_int8,
    fused_add_rms_norm_dynamic_per_token_quant_fp8,
    fused_add_rms_norm_dynamic_per_token_quant_int8,
    silu_and_mul_dynamic_per_token_quant_fp8,
    silu_and_mul_dynamic_per_token_quant_int8,
)
for _op in _STATIC_OPS:
    _op.register_input_generator(_static_inputs(_op))
for _op in _DYNAMIC_OPS:
    _op.register_input_generator(_dynamic_inputs(_op))

for _op in (*_STATIC_OPS, *_DYNAMIC_OPS, silu_and_mul_per_token_group_quant_fp8):
    # The quantized values may differ by 1 ulp of float16 or bfloat16, which may give the next code,
    # up to 1/8 of the value (or 2**-9) away. Scales change with the largest value of a row.
    _op.override_tolerance(torch.float8_e4m3fn, atol=2**-9, rtol=0.125)
