"""Provider ``flashinfer``: the CUDA kernels of an installed FlashInfer.

FlashInfer is imported at the first call, and compiles a kernel before it first runs. Only its
functions with the meaning of one of opweave's ops are here. The norms that quantize are left out:
they saturate NaN, which the ops keep. So is attention over the paged cache, which needs a plan made
from sequence lengths on the host before the call.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.rules import ROUNDS_LESS
from opweave.kernels.arguments import NARROW_FLOATS, aligned, nvidia, residual, row
from opweave.kernels.libraries.rotary_arguments import HEADS, float32_angles, tokens
from opweave.kernels.wrap import FunctionByArgument, Output, requires, wrap
from opweave.packages import is_installed

# The kernels are instantiated for 16-bit floats. They copy asynchronously, as Ampere does, and load
# the widest vectors that divide a row, of up to 16 bytes.
_X = nvidia("x", 8, 0) & rules.dtype("x", *NARROW_FLOATS) & rules.contiguous("x") & aligned("x")
# The weight is read with the dtype of x.
_NORM = (
    _X
    & rules.is_none("variance_size")
    & row("weight")
    & rules.same_dtype("x", "weight")
    & aligned("weight")
)
_GATED = _X & rules.last_dim_multiple_of("x", 2)
_GELUS: dict[object, str] = {
    "none": "flashinfer.activation:gelu_and_mul",
    "tanh": "flashinfer.activation:gelu_tanh_and_mul",
}


def _rotates_vectors(cos_sin_cache: Tensor, head_size: int) -> bool:
    """Whether both halves of the rotated part consist of the vectors that a thread loads."""
    return cos_sin_cache.shape[1] % (2 * max(8, head_size // 32)) == 0


if is_installed("flashinfer"):
    register = partial(wrap, provider="flashinfer", traits={ROUNDS_LESS}, **requires())
    register(
        ops.rms_norm,
        function="flashinfer.norm:rmsnorm",
        arguments=["x", "weight", "epsilon"],
        supports_args=_NORM & rules.ndim("x", 2, 3),
    )
    register(
        ops.fused_add_rms_norm,
        function="flashinfer.norm:fused_add_rmsnorm",
        arguments=[Output("x"), Output("x_residual"), "weight", "epsilon"],
        supports_args=_NORM & rules.ndim("x", 2) & residual("x_residual"),
    )
    register(
        ops.silu_and_mul,
        function="flashinfer.activation:silu_and_mul",
        arguments=["x"],
        supports_args=_GATED,
    )
    register(
        ops.gelu_and_mul,
        function=FunctionByArgument("approximate", _GELUS),
        arguments=["x"],
        supports_args=_GATED & rules.one_of("approximate", "none", "tanh"),
    )
    # Heads of other sizes go through a kernel for quantized caches.
    register(
        ops.rotary_embedding,
        function="flashinfer.rope:apply_rope_with_cos_sin_cache",
        arguments=[tokens, "x_query", "x_key", "head_size", float32_angles, "is_neox_style"],
        supports_args=nvidia("x_query", 8, 0)
        & rules.dtype("x_query", *NARROW_FLOATS)
        & HEADS
        & aligned("x_query", "x_key")
        & rules.one_of("head_size", 64, 128, 256, 512)
        & rules.custom(_rotates_vectors, "the rotated part is not made of whole vectors"),
    )
