"""Provider ``sgl_kernel``: the CUDA kernels of SGLang, of an installed sglang-kernel or sgl-kernel.

The library is imported at the first call. Only its functions with the meaning of one of opweave's
ops, and which both distributions have, are here. The quantizations are left out: a row with a NaN
gets a scale of its other elements, and not NaN. ``moe_sum`` is left out because it adds in the
dtype of the input, where the op adds in float32.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.rules import ROUNDS_LESS
from opweave.kernels.arguments import FLOATS, NARROW_FLOATS, aligned, nvidia, residual, row
from opweave.kernels.libraries.rotary_arguments import HEADS, angles, tokens
from opweave.kernels.wrap import FunctionByArgument, Output, requires, wrap
from opweave.packages import is_installed

_X = nvidia("x", 8, 0) & rules.contiguous("x") & aligned("x")
# The norms are matrix kernels for 16-bit floats, and read the weight with the dtype of x.
_NORM = (
    _X
    & rules.dtype("x", *NARROW_FLOATS)
    & rules.ndim("x", 2)
    & rules.is_none("variance_size")
    & row("weight")
    & rules.same_dtype("x", "weight")
    & aligned("weight")
)
# Each half of a row is made of whole vectors of 16 bytes: 8 elements, or 4 of float32.
_GATED = _X & rules.dtype("x", *FLOATS) & rules.last_dim_multiple_of("x", 16)
_GELUS: dict[object, str] = {
    "none": "sgl_kernel.elementwise:gelu_and_mul",
    "tanh": "sgl_kernel.elementwise:gelu_tanh_and_mul",
}


def _shares_keys(x_query: Tensor, x_key: Tensor) -> bool:
    """Whether each head of keys serves the same number of heads of queries."""
    return x_query.shape[1:].numel() % x_key.shape[1:].numel() == 0


if is_installed("sgl_kernel"):
    register = partial(wrap, provider="sgl_kernel", **requires())
    register(
        ops.rms_norm,
        function="sgl_kernel.elementwise:rmsnorm",
        arguments=["x", "weight", "epsilon"],
        supports_args=_NORM,
        traits={ROUNDS_LESS},
    )
    register(
        ops.fused_add_rms_norm,
        function="sgl_kernel.elementwise:fused_add_rmsnorm",
        arguments=[Output("x"), Output("x_residual"), "weight", "epsilon"],
        supports_args=_NORM & residual("x_residual"),
        traits={ROUNDS_LESS},
    )
    register(
        ops.silu_and_mul,
        function="sgl_kernel.elementwise:silu_and_mul",
        arguments=["x"],
        supports_args=_GATED,
    )
    register(
        ops.gelu_and_mul,
        function=FunctionByArgument("approximate", _GELUS),
        arguments=["x"],
        supports_args=_GATED & rules.one_of("approximate", "none", "tanh"),
    )
    register(
        ops.rotary_embedding,
        function="sgl_kernel.elementwise:rotary_embedding",
        arguments=[
            tokens,
            *map(Output, ("x_query", "x_key")),
            "head_size",
            angles,
            "is_neox_style",
        ],
        supports_args=nvidia("x_query", 8, 0)
        & rules.dtype("x_query", *FLOATS)
        & HEADS
        & rules.custom(_shares_keys, "the heads of keys do not divide those of queries"),
    )
