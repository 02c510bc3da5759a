"""Root-mean-square normalization with a gate."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.registry import register_op
from opweave.ir.traits import ROWWISE

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
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
    groups = _check(x, weight, z, group_size, activation)
    dtype = torch.promote_types(x.dtype, torch.float32)
    gate = None if z is None else _ACTIVATIONS[activation](z.to(dtype))
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


def _check(
    x: Tensor, weight: Tensor | None, z: Tensor | None, group_size: int | None, activation: str
) -> int:
    """Return the number of groups."""
    if z is not None and z.shape != x.shape:
        raise ValueError(
            f"rms_norm_gated: z must have the shape of x, {tuple(x.shape)}; found {tuple(z.shape)}."
        )
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm_gated: weight must have shape {tuple(x.shape[-1:])}, the last dimension of "
            f"x; found {tuple(weight.shape)}."
        )
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"rms_norm_gated: activation must be one of {', '.join(_ACTIVATIONS)}; found "
            f"{activation!r}."
        )
    if group_size is None:
        return 1
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(
            f"rms_norm_gated: group_size={group_size} does not divide the last dimension of x, "
            f"{x.shape[-1]}."
        )
    return max(1, x.shape[-1] // group_size)


@rms_norm_gated.register_input_generator
def _inputs(
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
