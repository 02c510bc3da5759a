"""Gated RMS norm."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.gated_norm import rms_norm_gated as op
from opweave.kernels.opweave_c.arguments import ROWS
from opweave.kernels.opweave_c.call_paths import implements, native_op

_empty_like = torch.empty_like
_rms_norm_gated = native_op("rms_norm_gated")


def _groups_fit(x: Tensor, group_size: int | None) -> bool:
    width = x.shape[-1]
    return width > 0 if group_size is None else group_size > 0 and width % group_size == 0


@implements(
    op,
    ROWS
    & rules.cpu("weight", "z")
    & rules.per_last_dim("weight", "x")
    & (rules.same_dtype("x", "weight") | rules.dtype("weight", torch.float32))
    & rules.same_dtype("x", "z")
    & rules.same_shape("x", "z")
    & rules.unit_stride("weight", "z")
    # With more dimensions, the strides of native's result depend on both x and z.
    & (rules.ndim("x", 1, 2) | rules.contiguous("x", "z"))
    & rules.one_of("activation", "silu", "swish", "sigmoid")
    & rules.custom(_groups_fit, "group_size does not divide the last dimension of x"),
)
def rms_norm_gated(
    x: Tensor,
    weight: Tensor | None,
    z: Tensor | None,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "silu",
) -> Tensor:
    """Normalize the rows of *x* (``[..., h]``) after or before multiplying with the gate."""
    out = _empty_like(x)
    size = x.shape[-1] if group_size is None else group_size
    _rms_norm_gated(out, x, weight, z, epsilon, size, norm_before_gate, activation == "sigmoid")
    return out
