"""RMS normalisation with a gate by the native module.

On the hot path of every layer, as in :mod:`opweave.kernels.opweave_c.norm`: the function calls the
C++ function directly, which refuses anything but plain CPU tensors; torch's dispatcher takes those.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opweave.ir import rules
from opweave.ir.ops.gated_norm import rms_norm_gated as op
from opweave.ir.traits import BATCH_INVARIANT
from opweave.kernels.opweave_c.doors import STATUS, direct, dispatched

_empty_like = torch.empty_like
_rms_norm_gated = direct("rms_norm_gated")
_rms_norm_gated_op = dispatched("rms_norm_gated")


def _groups_fit(
    x: Tensor,
    weight: Tensor | None,
    z: Tensor | None,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "silu",
) -> bool:
    width = x.shape[-1]
    return width > 0 if group_size is None else group_size > 0 and width % group_size == 0


@op.register_impl(
    "opweave_c",
    supported=STATUS.available,
    unsupported_reason=STATUS.reason_missing,
    supports_args=rules.cpu("x", "weight", "z")
    & rules.ndim("x", *range(1, 9))
    & rules.per_last_dim("weight", "x")
    & rules.dtype("x", torch.float32, torch.bfloat16, torch.float16)
    & (rules.same_dtype("x", "weight") | rules.dtype("weight", torch.float32))
    & rules.same_dtype("x", "z")
    & rules.same_shape("x", "z")
    & rules.unit_stride("x", "weight", "z")
    # With more dimensions, the order in memory of native's result depends on both.
    & (rules.ndim("x", 1, 2) | rules.contiguous("x", "z"))
    & rules.one_of("activation", "silu", "swish", "sigmoid")
    & rules.custom(_groups_fit, "group_size does not divide the last dimension of x"),
    traits={BATCH_INVARIANT},
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
    """Normalise the gated rows of *x* (``[..., h]``), or gate them after that."""
    out = _empty_like(x)
    size = x.shape[-1] if group_size is None else group_size
    sigmoid = activation == "sigmoid"
    if is_dynamo_compiling():
        _rms_norm_gated_op(out, x, weight, z, epsilon, size, norm_before_gate, sigmoid)
        return out
    try:
        _rms_norm_gated(out, x, weight, z, epsilon, size, norm_before_gate, sigmoid)
    except TypeError:
        _rms_norm_gated_op(out, x, weight, z, epsilon, size, norm_before_gate, sigmoid)
    return out
