"""Linear layers, norms and activations, one row at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.ir.ops.linear_w8a8 import scales_tokens
from opweave.ir.traits import BATCH_INVARIANT, DIFFERENTIABLE
from opweave.kernels.batch_invariant.opaque import opaque
from opweave.kernels.batch_invariant.rows import of_rows

_TRAITS = {BATCH_INVARIANT, DIFFERENTIABLE}


@ops.rms_norm.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.rms_norm)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    return _each_row(lambda row: ops.rms_norm.native(row, weight, epsilon, variance_size), x)


@ops.linear.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _joined(lambda row: ops.linear.native(row, weight, bias), x)


@ops.linear_w8a16.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.linear_w8a16)
def linear_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = weight.contiguous()  # for a column-major weight, torch sums one by one in float32
    return _joined(lambda row: ops.linear_w8a16.native(row, weight, scale, bias), x)


@ops.linear_w8a8.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.linear_w8a8)
def linear_w8a8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    rest = weight.contiguous(), scale, bias, out_dtype
    if x.ndim < 2 or x.numel() == 0 or not scales_tokens(x_scale, x):
        alone: Tensor = ops.linear_w8a8.native(x, x_scale, *rest)
        return alone
    codes = x.reshape(-1, x.shape[-1])
    scales = x_scale if x_scale.ndim == x.ndim else x_scale.reshape(1)
    scales = scales.reshape(-1, scales.shape[-1]).expand(len(codes), -1)
    rows = of_rows(lambda row, one: ops.linear_w8a8.native(row, one, *rest), codes, scales)
    return torch.cat(rows).reshape(*x.shape[:-1], weight.shape[0])


@ops.linear_w4a16.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.linear_w4a16)
def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    return _joined(lambda row: ops.linear_w4a16.native(row, weight, scale, offset, bias), x)


@ops.linear_q.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.linear_q)
def linear_q(x: Tensor, weight: Tensor, bias: Tensor | None = None, format: str = "q8_0") -> Tensor:
    return _joined(lambda row: ops.linear_q.native(row, weight, bias, format), x)


@ops.silu_and_mul.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.silu_and_mul)
def silu_and_mul(x: Tensor) -> Tensor:
    return _each_row(ops.silu_and_mul.native, x)


@ops.mul_and_silu.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.mul_and_silu)
def mul_and_silu(x: Tensor) -> Tensor:
    return _each_row(ops.mul_and_silu.native, x)


@ops.gelu_and_mul.register_impl("batch_invariant", traits=_TRAITS)
@opaque(ops.gelu_and_mul)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    # Expanding each row makes it non-contiguous, which avoids oneDNN, whose gelu(inf) is NaN.
    def alone(row: Tensor) -> Tensor:
        twice: Tensor = ops.gelu_and_mul.native(row.expand(2, *row.shape), approximate)
        return twice[0]

    return _each_row(alone, x)


def _each_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply *function* to each row; the result has the strides of *x*."""
    joined = _joined(function, x)
    if x.is_contiguous() or joined.shape[-1] == 0:
        return joined
    return torch.empty_like(x[..., : joined.shape[-1]]).copy_(joined)


def _joined(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.ndim < 2 or x.numel() == 0:
        return function(x)
    rows = of_rows(function, x.reshape(-1, x.shape[-1]))
    return torch.cat(rows).reshape(*x.shape[:-1], rows[0].shape[-1])
