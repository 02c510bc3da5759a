"""RMS norms with ``torch.nn.functional.rms_norm``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir import ops, rules
from opweave.ir.rules import DIFFERENTIABLE, ROUNDS_LESS
from opweave.kernels.aten.attention import aligned

# F.rms_norm multiplies by the weight in float32 and rounds once; the op's definition also rounds
# before the product. In bfloat16, a quarter of the elements differ from native by one ulp. With a
# weight of another dtype, the results would differ by more than the tolerance.
_TRAITS = {DIFFERENTIABLE, ROUNDS_LESS}
_SUPPORTED = (
    rules.is_none("variance_size")
    # For other rows, torch's CUDA kernel computes moments around the mean: one infinity turns the
    # whole row into NaN.
    & rules.dtype("x", torch.float32, torch.bfloat16, torch.float16)
    & rules.last_dim_multiple_of("x", 4)
    & rules.per_last_dim("weight", "x")
    & rules.contiguous("x")  # F.rms_norm returns a contiguous result for any strides of x
)


@ops.rms_norm.register_impl(
    "aten", supports_args=_SUPPORTED & rules.same_dtype("x", "weight"), traits=_TRAITS
)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    return _normed(x, weight, epsilon)


@ops.fused_add_rms_norm.register_impl(
    "aten",
    supports_args=_SUPPORTED
    & rules.contiguous("x_residual")
    & rules.same_shape("x", "x_residual")
    & rules.same_dtype("x", "x_residual", "weight"),
    traits=_TRAITS,
)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    residual = x + x_residual
    return _normed(residual, weight, epsilon), residual


def _normed(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    weight = None if weight is None else aligned(weight)
    return functional.rms_norm(aligned(x), x.shape[-1:], weight, epsilon)
