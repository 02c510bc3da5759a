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
    & rules.same_dtype("x", "weight")
    & rules.custom(
        lambda x, weight, epsilon, variance_size=None: x.ndim > 0, "x: 0-d (supports 1-d or more)"
    )
)
_SUM_SUPPORTED = (
    rules.is_none("variance_size")
    & rules.same_dtype("x", "x_residual", "weight")
    & rules.custom(
        lambda x, x_residual, weight, epsilon, variance_size=None: x.ndim > 0,
        "x: 0-d (supports 1-d or more)",
    )
)


@ops.rms_norm.register_impl("aten", supports_args=_SUPPORTED, traits={DIFFERENTIABLE})
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, epsilon)


@ops.fused_add_rms_norm.register_impl("aten", supports_args=_SUM_SUPPORTED, traits={DIFFERENTIABLE})
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    residual = x + x_residual
    return functional.rms_norm(residual, x.shape[-1:], weight, epsilon), residual
