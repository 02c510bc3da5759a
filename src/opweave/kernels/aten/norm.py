"""``torch.nn.functional.rms_norm`` for the norms."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from opweave.ir import ops, rules
from opweave.ir.traits import DIFFERENTIABLE

# F.rms_norm multiplies in float32 and rounds once: with a weight of another dtype the op's
# definition rounds at another place, so the results would differ by more than the tolerance.
_SUPPORTED = (
    rules.is_none("variance_size")
    & rules.per_last_dim("weight", "x")
    & rules.contiguous("x")  # F.rms_norm gives a contiguous result whatever the strides of x
)


@ops.rms_norm.register_impl(
    "aten", supports_args=_SUPPORTED & rules.same_dtype("x", "weight"), traits={DIFFERENTIABLE}
)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, epsilon)


@ops.fused_add_rms_norm.register_impl(
    "aten",
    supports_args=_SUPPORTED
    & rules.contiguous("x_residual")
    & rules.same_shape("x", "x_residual")
    & rules.same_dtype("x", "x_residual", "weight"),
    traits={DIFFERENTIABLE},
)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    residual = x + x_residual
    return functional.rms_norm(residual, x.shape[-1:], weight, epsilon), residual
