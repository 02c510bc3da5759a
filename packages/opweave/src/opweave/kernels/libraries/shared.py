"""Registrations and arguments that several libraries share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from opweave.ir import ops, rules
from opweave.ir.rules import ROUNDS_LESS, Rule
from opweave.kernels.arguments import NARROW_FLOATS, aligned, residual, row
from opweave.kernels.wrap import FunctionByArgument, Output

REGISTERS_FOR_CALLER = True

# Norms and activations of FlashInfer, which SGLang has, too.


def register_rows(
    register: Callable[..., None], norms: str, activations: str, x: Rule, gated: Rule, *ndims: int
) -> None:
    """Register the functions of the modules *norms* and *activations*.

    The norms are made for 16-bit floats, and read the weight with the dtype of x.

    Args:
        x, gated: the rules of a norm's and of an activation's input.
        ndims: the numbers of dimensions that ``rmsnorm`` accepts.
    """
    norm = (
        x
        & rules.dtype("x", *NARROW_FLOATS)
        & rules.is_none("variance_size")
        & row("weight")
        & rules.same_dtype("x", "weight")
        & aligned("weight")
    )
    register(
        ops.rms_norm,
        function=f"{norms}:rmsnorm",
        arguments=["x", "weight", "epsilon"],
        supports_args=norm & rules.ndim("x", *ndims),
        traits={ROUNDS_LESS},
    )
    register(
        ops.fused_add_rms_norm,
        function=f"{norms}:fused_add_rmsnorm",
        arguments=[Output("x"), Output("x_residual"), "weight", "epsilon"],
        supports_args=norm & rules.ndim("x", 2) & residual("x_residual"),
        traits={ROUNDS_LESS},
    )
    register(
        ops.silu_and_mul,
        function=f"{activations}:silu_and_mul",
        arguments=["x"],
        supports_args=gated,
    )
    functions: dict[object, str] = {
        "none": f"{activations}:gelu_and_mul", "tanh": f"{activations}:gelu_tanh_and_mul"
    }  # fmt: skip
    register(
        ops.gelu_and_mul,
        function=FunctionByArgument("approximate", functions),
        arguments=["x"],
        supports_args=gated & rules.one_of("approximate", *functions),
    )


# Arguments of ``rotary_embedding``.
#
# The kernels index the table themselves, without a check of the positions, and negative ones read
# memory before it. They get the rows of the table that the positions select instead.


def angles(x_query: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Return the cosines and sines of each token, ``(tokens, r)``, in the dtype of the queries."""
    return cos_sin_cache[positions].to(x_query.dtype)


def float32_angles(x_query: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Return :func:`angles`, rounded to the dtype of the queries, in float32."""
    return angles(x_query, positions, cos_sin_cache).float()


def tokens(positions: Tensor) -> Tensor:
    """Return the row of :func:`angles` of each token."""
    return torch.arange(len(positions), device=positions.device)


def _fits(
    x_query: Tensor, x_key: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_size: int
) -> bool:
    return (
        cos_sin_cache.ndim == 2
        and 0 < cos_sin_cache.shape[1] <= head_size
        and cos_sin_cache.shape[1] % 2 == 0
        and x_query.ndim == x_key.ndim
        and all(_has_heads(x, len(positions), head_size) for x in (x_query, x_key))
    )


def _has_heads(x: Tensor, count: int, head_size: int) -> bool:
    if x.ndim not in (2, 3) or x.shape[0] != count or 0 in x.shape[1:]:
        return False
    return math.prod(x.shape[1:]) % head_size == 0 and (x.ndim == 2 or x.shape[2] == head_size)


HEADS: Rule = (
    rules.ndim("positions", 1)
    & rules.dtype("positions", torch.int64, torch.int32)
    & rules.same_dtype("x_query", "x_key")
    & rules.same_device("x_query", "x_key", "positions", "cos_sin_cache")
    & rules.contiguous("x_query", "x_key")
    & rules.custom(_fits, "the heads, the table and the head size do not fit")
)
"""Contiguous heads, flat or split, and a position for each token."""
