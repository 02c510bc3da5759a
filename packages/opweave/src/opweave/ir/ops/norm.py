"""Root-mean-square normalization."""

import torch
from torch import Tensor

from opweave.ir.registry import register_op
from opweave.ir.spelling import ROWWISE_ELEMENTS
from opweave.ir.traits import BATCH_INVARIANT, ROWWISE


@register_op(native_traits={ROWWISE})
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Root-mean-square layer normalization over the last dimension.

    ``y = x * rsqrt(mean(x**2) + epsilon) * weight``. Normalizes in float32 (float64 stays), casts
    to the weight's dtype, multiplies, and casts back to the dtype of ``x``.

    Args:
        x: ``(..., hidden)``, floating point, any strides.
        weight: ``(hidden,)``, any floating dtype, or None for no scaling.
        epsilon: added to the mean square.
        variance_size: compute the mean square over ``x[..., :variance_size]`` only.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: ``x`` is not floating point, the weight's shape is not ``(hidden,)``, or
            ``variance_size`` is not between 1 and ``hidden``.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """
    if not x.is_floating_point():
        raise ValueError(f"rms_norm: x is {x.dtype}, not floating point.")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must have shape {tuple(x.shape[-1:])}, the last dimension of x; "
            f"found {tuple(weight.shape)}."
        )
    if variance_size is not None and not 0 < variance_size <= x.shape[-1]:
        raise ValueError(
            f"rms_norm: variance_size={variance_size} is not between 1 and the last dimension of "
            f"x, {x.shape[-1]}."
        )
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    measured = y if variance_size is None else y[..., :variance_size]
    y = y * torch.rsqrt(measured.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    if weight is not None:
        y = y.to(weight.dtype) * weight
    return y.to(x.dtype)


@register_op(allow_inplace=True, composite=True, native_traits={BATCH_INVARIANT, ROWWISE})
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Add a residual, then normalize: ``s = x + x_residual``; ``(rms_norm(s, ...), s)``.

    A composite: the sum is rounded to the dtype of ``x`` before the norm.

    Args:
        x: ``(..., hidden)``, floating point.
        x_residual: the shape and dtype of ``x``.
        weight, epsilon, variance_size: as in ``rms_norm``.

    Returns:
        The normalized sum and the sum, both with the shape and dtype of ``x``.

    Raises:
        ValueError: ``x_residual`` differs from ``x`` in shape or dtype; or as ``rms_norm``.
    """
    if x_residual.shape != x.shape or x_residual.dtype != x.dtype:
        raise ValueError(
            f"fused_add_rms_norm: x_residual must be {x.dtype}, {tuple(x.shape)}, as x is; found "
            f"{x_residual.dtype}, {tuple(x_residual.shape)}."
        )
    residual = x + x_residual
    return rms_norm(residual, weight, epsilon, variance_size), residual


@rms_norm.register_input_generator
def _rms_norm_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, float, None]:
    x = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
    weight = torch.randn(hidden_size, device=device).to(dtype)
    return x, weight, 1e-6, None


@fused_add_rms_norm.register_input_generator
def _fused_add_rms_norm_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, float, None]:
    x, weight, epsilon, _ = _rms_norm_inputs(num_tokens, hidden_size, dtype, device)
    return x, torch.randn_like(x), weight, epsilon, None


for _op in (rms_norm, fused_add_rms_norm):
    # Kernels may round once less than native, and 1 ulp of float16 is large.
    _op.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)


def _call_with_wide_weight(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    wide = None if weight is None else weight.to(torch.promote_types(x.dtype, torch.float32))
    result: Tensor = rms_norm(x, wide, epsilon, variance_size)
    return result


@rms_norm.register_spelling(marker="rsqrt", elements=ROWWISE_ELEMENTS, call=_call_with_wide_weight)
def _rounded_last(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """As in OLMo 2, and in Gemma with 1 + weight: the product with the weight is in float32."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y * torch.rsqrt(y.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return (y if weight is None else weight * y).to(x.dtype)


@rms_norm.register_spelling(marker="rsqrt", elements=ROWWISE_ELEMENTS, call=_call_with_wide_weight)
def _torch_rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Inductor's decomposition of ``torch.nn.functional.rms_norm``."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = y.pow(2).mean(dim=x.ndim - 1, keepdim=True)
    y = y * torch.rsqrt(torch.ops.aten.add.Scalar(mean, epsilon))
    return (y if weight is None else y * weight).to(x.dtype)


rms_norm.register_spelling(marker="rsqrt", elements=ROWWISE_ELEMENTS)(
    rms_norm.native
)  # as in Llama
