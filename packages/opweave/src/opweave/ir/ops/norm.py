"""Normalization: root-mean-square, gated, and layer normalization."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.op import ROWWISE_ELEMENTS
from opweave.ir.ops.arguments import inputs_from_rows, random_row
from opweave.ir.registry import register_op
from opweave.ir.rules import BATCH_INVARIANT, ROWWISE

# Root-mean-square normalization.


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
    _check_weight("rms_norm", x, weight)
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


def _check_weight(op: str, x: Tensor, weight: Tensor | None) -> None:
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight must have shape {tuple(x.shape[-1:])}, the last dimension of x; found "
            f"{tuple(weight.shape)}."
        )


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
@inputs_from_rows
def _rms_norm_inputs(x: Tensor) -> tuple[Tensor, Tensor, float, None]:
    return x, random_row(x), 1e-6, None


@fused_add_rms_norm.register_input_generator
@inputs_from_rows
def _fused_add_rms_norm_inputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, float, None]:
    return x, torch.randn_like(x), random_row(x), 1e-6, None


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


# As in Llama.
rms_norm.register_spelling(marker="rsqrt", elements=ROWWISE_ELEMENTS)(rms_norm.native)


# Layer normalization.


@register_op(native_traits={ROWWISE})
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias`` over the last dimension.

    Computed in float32 (float64 stays), rounded once, with the population variance.

    Args:
        x: ``(..., hidden)``, floating point.
        weight, bias: ``(hidden,)``, any floating dtype; None for 1 and 0.
        epsilon: added to the variance.

    Returns:
        Shape and dtype of ``x``, contiguous.

    Source: Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450.
    """
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = None if weight is None else weight.to(y.dtype)
    shift = None if bias is None else bias.to(y.dtype)
    return functional.layer_norm(y, y.shape[-1:], factor, shift, epsilon).to(x.dtype)


@layer_norm.register_input_generator
@inputs_from_rows
def _layer_norm_inputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    return 1 + x, random_row(x), random_row(x), 1e-5


@layer_norm.register_spelling(marker="var_mean", elements=ROWWISE_ELEMENTS)
def _torch_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


layer_norm.register_spelling(marker="var_mean", elements=ROWWISE_ELEMENTS)(layer_norm.native)


# Root-mean-square normalization with a gate.


GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "sigmoid": torch.sigmoid,
}


@register_op(native_traits={ROWWISE})
def rms_norm_gated(
    x: Tensor,
    weight: Tensor | None,
    z: Tensor | None,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "silu",
) -> Tensor:
    """``rms_norm(x * act(z)) * weight``, or ``rms_norm(x) * weight * act(z)``.

    Computed in float32 (float64 stays), rounded once.

    Args:
        x: ``(..., hidden)``, floating point.
        weight: ``(hidden,)``, any floating dtype, or None for no scaling.
        z: the gate, the shape of ``x``, any floating dtype; or None for no gate.
        epsilon: added to the mean square.
        group_size: normalize groups of this many elements separately; None for one group.
        norm_before_gate: normalize before the gate is applied, instead of after.
        activation: activation of the gate: ``"silu"`` (or ``"swish"``, its other name), or
            ``"sigmoid"``.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: the shape of ``z`` differs from ``x``, the weight's shape is not ``(hidden,)``,
            ``group_size`` does not divide ``hidden``, or ``activation`` is unknown.

    Source: Mamba-2, Dao and Gu, arXiv:2405.21060; with ``norm_before_gate``, Gated DeltaNet,
    arXiv:2412.06464.
    """
    if z is not None and z.shape != x.shape:
        raise ValueError(
            f"rms_norm_gated: z must have the shape of x, {tuple(x.shape)}; found {tuple(z.shape)}."
        )
    _check_weight("rms_norm_gated", x, weight)
    if activation not in GATE_ACTIVATIONS:
        raise ValueError(
            f"rms_norm_gated: activation must be one of {', '.join(GATE_ACTIVATIONS)}; found "
            f"{activation!r}."
        )
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(
            f"rms_norm_gated: group_size={group_size} does not divide the last dimension of x, "
            f"{x.shape[-1]}."
        )
    groups = 1 if group_size is None else max(1, x.shape[-1] // group_size)
    dtype = torch.promote_types(x.dtype, torch.float32)
    gate = None if z is None else GATE_ACTIVATIONS[activation](z.to(dtype))
    y = x.to(dtype)
    if gate is not None and not norm_before_gate:
        y = y * gate
    size = x.shape[-1] // groups
    grouped = y if groups == 1 else torch.unflatten(y, -1, (groups, size))
    grouped = grouped * torch.rsqrt(grouped.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    y = grouped if groups == 1 else grouped.flatten(-2)
    if weight is not None:
        y = y * weight.to(dtype)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


@rms_norm_gated.register_input_generator
def _gated_norm_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    num_groups: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, float, int | None, bool, str]:
    x, z = torch.randn(2, num_tokens, hidden_size, device=device).to(dtype)
    weight = torch.randn(hidden_size, device=device).to(dtype)
    group_size = hidden_size // num_groups if hidden_size % num_groups == 0 else None
    return x, weight, z, 1e-5, group_size, False, "silu"
