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
from opweave.kernels.arguments import FLOATS, aligned, nvidia
from opweave.kernels.libraries.shared import HEADS, angles, register_rows, tokens
from opweave.kernels.wrap import Output, requires, wrap
from opweave.packages import is_installed

_X = nvidia("x", 8, 0) & rules.contiguous("x") & aligned("x")
# Each half of a row is made of whole vectors of 16 bytes: 8 elements, or 4 of float32.
_GATED = _X & rules.dtype("x", *FLOATS) & rules.last_dim_multiple_of("x", 16)


def _shares_keys(x_query: Tensor, x_key: Tensor) -> bool:
    """Whether each head of keys serves the same number of heads of queries."""
    return x_query.shape[1:].numel() % x_key.shape[1:].numel() == 0


if is_installed("sgl_kernel"):
    register = partial(wrap, provider="sgl_kernel", **requires())
    elementwise = "sgl_kernel.elementwise"
    register_rows(register, elementwise, elementwise, _X, _GATED, 2)
    register(
        ops.rotary_embedding,
        function="sgl_kernel.elementwise:rotary_embedding",
        arguments=[
            tokens,
            Output("x_query"),
            Output("x_key"),
            "head_size",
            angles,
            "is_neox_style",
        ],
        supports_args=nvidia("x_query", 8, 0)
        & rules.dtype("x_query", *FLOATS)
        & HEADS
        & rules.custom(_shares_keys, "the heads of keys do not divide those of queries"),
    )
