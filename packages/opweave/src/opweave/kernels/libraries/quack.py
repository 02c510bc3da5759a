"""Provider ``quack``: the norms of an installed QuACK (quack-kernels), in CuTe.

The library is imported at the first call, and compiles a kernel before it first runs. Its softmax,
top-k and cross entropy are not ops of opweave, or treat ties and NaN otherwise.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.rules import ROUNDS_LESS
from opweave.kernels.arguments import FLOATS, aligned, nvidia, residual, row
from opweave.kernels.wrap import requires, wrap
from opweave.packages import is_installed

# The kernels are made for matrices, and for Hopper and later GPUs, whose clusters share long rows.
_X = (
    nvidia("x", 9, 0)
    & rules.dtype("x", *FLOATS)
    & rules.ndim("x", 2)
    & rules.contiguous("x")
    & aligned("x")
)
_WEIGHT = row("weight") & rules.dtype("weight", *FLOATS) & aligned("weight")
_NORM = _X & rules.is_none("variance_size") & (rules.is_none("weight") | _WEIGHT)


def _float32_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


if is_installed("quack"):
    register = partial(wrap, provider="quack", **requires("cutlass"))
    register(
        ops.rms_norm,
        function="quack.rmsnorm:rmsnorm_fwd",
        arguments={"x": "x", "weight": "weight", "eps": "epsilon"},
        results=0,
        supports_args=_NORM,
        traits={ROUNDS_LESS},
    )
    register(
        ops.fused_add_rms_norm,
        function="quack.rmsnorm:rmsnorm_fwd",
        arguments={"x": "x", "weight": "weight", "residual": "x_residual", "eps": "epsilon"},
        results=(0, 1),
        supports_args=_NORM & residual("x_residual") & aligned("x_residual"),
        traits={ROUNDS_LESS},
    )
    register(
        ops.layer_norm,
        function="quack.rmsnorm:layernorm_fwd",
        arguments=["x", lambda weight: weight.float(), _float32_bias, "epsilon"],
        supports_args=_X & _WEIGHT & (rules.is_none("bias") | (row("bias") & aligned("bias"))),
    )
