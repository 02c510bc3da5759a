"""Provider ``flag_gems``: the Triton kernels of an installed FlagGems.

The library is imported at the first call. Only its functions with the meaning of one of opweave's
ops are here. ``per_token_group_quant_fp8`` is left out: a group with a NaN gets a scale of its
other elements, and not NaN. So are ``moe_sum`` and ``topk_softmax``, which run on the current
device instead of that of the tensors.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.rules import ROUNDS_LESS
from opweave.kernels.arguments import residual, row
from opweave.kernels.libraries.shared import HEADS, angles, tokens
from opweave.kernels.triton.launch import (
    INTERPRETED,
    LIBRARY_FLOATS,
    half_of,
    library_rows,
    on_device,
)
from opweave.kernels.wrap import Output, requires, wrap
from opweave.packages import is_installed

_X = library_rows("x")
_NORM = _X & rules.is_none("variance_size") & row("weight") & rules.dtype("weight", *LIBRARY_FLOATS)


_HALVES = [lambda x: x[..., : x.shape[-1] // 2], lambda x: x[..., x.shape[-1] // 2 :]]


def _columns(x: Tensor) -> tuple[int]:
    return (x.shape[-1],)


def _cosines(x_query: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    return angles(x_query, positions, cos_sin_cache).chunk(2, -1)[0]


def _sines(x_query: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    return angles(x_query, positions, cos_sin_cache).chunk(2, -1)[1]


def _is_interleaved(is_neox_style: bool) -> bool:
    return not is_neox_style


if is_installed("flag_gems"):
    register = partial(
        wrap, provider="flag_gems", traits={ROUNDS_LESS}, **requires("triton", gpu=not INTERPRETED)
    )
    register(
        ops.rms_norm,
        function="flag_gems.ops.rms_norm:rms_norm_forward",
        arguments=["x", _columns, "weight", "epsilon"],
        results=0,
        supports_args=_NORM,
    )
    register(
        ops.fused_add_rms_norm,
        function="flag_gems.fused.fused_add_rms_norm:fused_add_rms_norm",
        arguments=[Output("x"), Output("x_residual"), _columns, "weight", "epsilon"],
        supports_args=_NORM & residual("x_residual"),
    )
    register(
        ops.layer_norm,
        function="flag_gems.ops.layernorm:layer_norm",
        arguments=["x", _columns, "weight", "bias", "epsilon"],
        results=0,
        supports_args=_X
        & (rules.is_none("weight") | (row("weight") & rules.dtype("weight", *LIBRARY_FLOATS)))
        & (rules.is_none("bias") | (row("bias") & rules.dtype("bias", *LIBRARY_FLOATS))),
        traits=(),
    )
    register(
        ops.silu_and_mul,
        function="flag_gems.fused.silu_and_mul:silu_and_mul_out",
        arguments=[*_HALVES, Output(lambda x: half_of(x, x.dtype))],
        supports_args=_X & rules.last_dim_multiple_of("x", 2),
    )
    register(
        ops.gelu_and_mul,
        function="flag_gems.fused.gelu_and_mul:gelu_and_mul",
        arguments=[*_HALVES, "approximate"],
        supports_args=_X
        & rules.last_dim_multiple_of("x", 2)
        & rules.one_of("approximate", "none", "tanh"),
    )
    # The kernel rotates whole heads, and returns them split.
    register(
        ops.rotary_embedding,
        function="flag_gems.fused.rotary_embedding:apply_rotary_pos_emb",
        arguments=["x_query", "x_key", _cosines, _sines, tokens, _is_interleaved],
        supports_args=on_device("x_query")
        & rules.dtype("x_query", *LIBRARY_FLOATS)
        & HEADS
        & rules.ndim("x_query", 3)
        & rules.custom(
            lambda cos_sin_cache, head_size: cos_sin_cache.shape[1] == head_size,
            "the table is not as wide as a head",
        ),
    )
