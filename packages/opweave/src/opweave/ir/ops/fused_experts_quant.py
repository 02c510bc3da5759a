"""Mixture of experts with quantized weights: :func:`fused_experts`, with low-bit products."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from opweave.ir.ops.arguments import misfit
from opweave.ir.ops.fused_experts import (
    bound_activation,
    combine,
    expert_activation,
    fused_experts,
    route,
)
from opweave.ir.ops.linear import linear_w8a8, linear_w8a16
from opweave.ir.ops.low_bit import GGUF_BLOCKS, linear_q, linear_w4a16, random_blocks
from opweave.ir.ops.quant import (
    dynamic_per_token_quant_fp8,
    dynamic_per_token_quant_int8,
    per_token_group_quant_fp8,
)
from opweave.ir.registry import IrOp, register_op

SCALED_FORMATS = ("w4a16", "w8a16", "w8a8", "w8a8_ue8m0")
EXPERT_FORMATS = (*SCALED_FORMATS, *GGUF_BLOCKS)
"""The formats of weights that :func:`fused_experts_quant` supports."""

ExpertFunction = Callable[[int, Tensor], Tensor]
"""Returns ``(n, out)`` for an expert and its tokens ``(n, in)``."""

_misfit = partial(misfit, "fused_experts_quant")


@register_op(autocast=False)
def fused_experts_quant(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w13_offset: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    w2_offset: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_format: str = "w4a16",
    w2_format: str = "w4a16",
    activation: str = "silu",
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
) -> Tensor:
    """:func:`fused_experts` with low-bit linear layers, each rounded to the dtype of ``x``.

    Weights, scales and offsets have a first dimension of experts, and then the shape that the
    linear layer takes. A format is one of:

    - ``"w4a16"``: ``linear_w4a16``. Only this format has an offset, which may be None.
    - ``"w8a16"``: ``linear_w8a16`` with one scale for each row.
    - ``"w8a8"``: ``linear_w8a8``. Activations are quantized with one scale per token, or, with a
      scale for each block of weights, per group of as many columns as a block has.
    - ``"w8a8_ue8m0"``: the same, with scales of groups rounded up to powers of two.
    - a format of ``linear_q``, such as ``"q4_k"``, without a scale.

    Args:
        x: ``(T, hidden)``, floating point.
        w13: the experts' gate and up projections, with the rows that ``fused_experts`` describes.
        w13_scale, w13_offset: of ``w13``.
        w2: the experts' down projections.
        w2_scale, w2_offset: of ``w2``.
        topk_weights: ``(T, K)``, floating point.
        topk_ids: ``(T, K)``, integer. Ids out of range, such as -1, contribute nothing.
        w13_format, w2_format: the formats of the weights.
        activation, expert_map, apply_router_weight_on_input, alpha, beta, limit: as in
            ``fused_experts``.

    Returns:
        ``(T, hidden)`` in the dtype of ``x``, contiguous.

    Raises:
        ValueError: a format is unknown, or shapes or dtypes do not fit.

    Source: as for the linear layers and ``fused_experts``.
    """
    act = bound_activation(activation, alpha, beta, limit)
    check_experts_quant(
        x, w13, w13_scale, w13_offset, w2, w2_scale, w2_offset, topk_weights, topk_ids,
        w13_format, w2_format, activation,
    )  # fmt: skip
    routed = route(x, topk_weights, topk_ids, len(w13), expert_map, apply_router_weight_on_input)
    if len(w13) == 0:
        return x.new_zeros(x.shape)
    first = low_bit_product(w13, w13_scale, w13_offset, w13_format, _native)
    second = low_bit_product(w2, w2_scale, w2_offset, w2_format, _native)
    outputs = [second(expert, act(first(expert, routed.x))) for expert in range(len(w13))]
    index = routed.experts.long()[..., None].expand(-1, -1, x.shape[1])
    return combine(torch.stack(outputs, 1).gather(1, index), routed)


def _native(op: IrOp) -> Callable[..., Any]:
    return op.native


def _selected(op: IrOp) -> Callable[..., Any]:
    return cast("Callable[..., Any]", op)


def low_bit_product(
    weight: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    format: str,
    of_op: Callable[[IrOp], Callable[..., Any]] = _selected,
) -> ExpertFunction:
    """Return the product of each expert by the linear layer of *format*.

    Args:
        weight, scale, offset, format: as in ``fused_experts_quant``.
        of_op: returns the function to call for an op; by default, each call selects one.
    """

    def product(expert: int, rows: Tensor) -> Tensor:
        found: Tensor
        own = weight[expert]
        if scale is None:
            found = of_op(linear_q)(rows, own, None, format)
        elif format == "w4a16":
            own_offset = None if offset is None else offset[expert]
            found = of_op(linear_w4a16)(rows, own, scale[expert], own_offset)
        elif format == "w8a16":
            found = of_op(linear_w8a16)(rows, own, scale[expert])
        else:
            factors = scale[expert]
            if factors.ndim == 2:
                group = own.shape[1] // factors.shape[1]
                codes, of_token = of_op(per_token_group_quant_fp8)(
                    rows, group, format == "w8a8_ue8m0"
                )
            elif own.dtype is torch.int8:
                codes, of_token = of_op(dynamic_per_token_quant_int8)(rows)
            else:
                codes, of_token = of_op(dynamic_per_token_quant_fp8)(rows)
            found = of_op(linear_w8a8)(codes, of_token, own, factors, None, rows.dtype)
        return found

    return product


def check_experts_quant(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w13_offset: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor | None,
    w2_offset: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_format: str,
    w2_format: str,
    activation: str,
) -> None:
    """Raise ValueError unless the shapes and dtypes fit together."""
    if x.ndim != 2 or not x.is_floating_point():
        raise _misfit("x", x, "floating point, (tokens, hidden)")
    if topk_ids.ndim != 2 or topk_ids.is_floating_point() or topk_ids.dtype is torch.bool:
        raise _misfit("topk_ids", topk_ids, "integers, (tokens, experts per token)")
    if topk_ids.shape[0] != x.shape[0] or topk_weights.shape != topk_ids.shape:
        wanted = f"like topk_ids, with a row for each of {x.shape[0]} tokens"
        raise _misfit("topk_weights", topk_weights, wanted)
    hidden = x.shape[1]
    _check_weight("w13", w13, w13_scale, w13_offset, w13_format, hidden)
    rows = w13.shape[1]
    size = rows // 2 if expert_activation(activation).gated else rows
    _check_weight("w2", w2, w2_scale, w2_offset, w2_format, size)
    if tuple(w2.shape[:2]) != (w13.shape[0], hidden):
        raise _misfit("w2", w2, f"({w13.shape[0]}, {hidden}, ...) to fit w13 and x")


def _check_weight(
    name: str,
    weight: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    format: str,
    columns: int,
) -> None:
    if format not in EXPERT_FORMATS:
        known = ", ".join(map(repr, EXPERT_FORMATS))
        raise ValueError(
            f"fused_experts_quant: {name}_format must be one of {known}; found {format!r}."
        )
    if weight.ndim != 3 or weight.shape[2] != _width(format, columns):
        wanted = f"(experts, rows, {_width(format, columns)}) for {format}"
        raise _misfit(name, weight, f"{wanted} of {columns} columns")
    if (scale is not None) != (format in SCALED_FORMATS):
        raise ValueError(
            f"fused_experts_quant: {name}_scale must be {'a tensor' if scale is None else 'None'} "
            f"for {format}."
        )
    if scale is not None and (scale.ndim < 2 or len(scale) != len(weight)):
        raise _misfit(f"{name}_scale", scale, f"with a first dimension of {len(weight)} experts")
    if offset is not None and (format != "w4a16" or len(offset) != len(weight)):
        raise _misfit(f"{name}_offset", offset, "None, or like the scale of w4a16")


def _width(format: str, columns: int) -> int:
    """Return the last size of a weight of so many *columns*."""
    if format in GGUF_BLOCKS:
        block = GGUF_BLOCKS[format]
        return -(-columns // block.columns) * block.size
    return columns // 2 if format == "w4a16" else columns


@fused_experts_quant.register_input_generator
def _inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    intermediate_size: int = 32,
    num_experts: int = 4,
    topk: int = 2,
    unrouted: bool = False,
    has_map: bool = False,
    format: str = "w4a16",
    w2_format: str = "",
    block_size: int = 0,
    weight_dtype: torch.dtype = torch.int8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Make experts, tokens and their routing as for ``fused_experts``.

    An empty *w2_format* stands for *format*. *block_size* and *weight_dtype* are those of
    ``linear_w8a8``.
    """
    x, _, _, weights, ids, activation, places, *_ = fused_experts.generate_inputs(
        num_tokens=num_tokens, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_experts=num_experts, topk=topk, unrouted=unrouted, has_map=has_map, dtype=dtype,
        device=device,
    )  # fmt: skip
    formats = format, w2_format or format
    rest = block_size, weight_dtype, device
    w13 = _weights(num_experts, 2 * intermediate_size, hidden_size, formats[0], *rest)
    w2 = _weights(num_experts, hidden_size, intermediate_size, formats[1], *rest)
    return x, *w13, *w2, weights, ids, *formats, activation, places, False, None, None, None


def _weights(
    experts: int, rows: int, columns: int, format: str, block_size: int,
    weight_dtype: torch.dtype, device: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the weights of all experts, their scales and offsets."""
    sizes = {"hidden_size": columns, "output_size": rows, "num_tokens": 0, "device": device}
    made: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
    for _ in range(experts):
        if format in GGUF_BLOCKS:
            made.append((random_blocks(rows, columns, format, device), None, None))
        elif format == "w4a16":
            _, q, scale, offset, _ = linear_w4a16.generate_inputs(**sizes)
            made.append((q, scale, offset))
        elif format == "w8a16":
            _, q, scale, _ = linear_w8a16.generate_inputs(**sizes, weight_dtype=weight_dtype)
            made.append((q, scale, None))
        else:
            _, _, q, scale, *_ = linear_w8a8.generate_inputs(
                **sizes, weight_dtype=weight_dtype, block_size=block_size
            )
            made.append((q, scale, None))
    weight, *rest = (
        None if parts[0] is None else torch.stack([part for part in parts if part is not None])
        for parts in zip(*made, strict=True)
    )
    assert weight is not None
    return weight, rest[0], rest[1]


# Sums in a different order with three roundings to the dtype, as for fused_experts; and a hidden
# value between two codes may get the other one.
fused_experts_quant.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)
fused_experts_quant.override_tolerance(torch.bfloat16, atol=3e-2, rtol=1.6e-2)
fused_experts_quant.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)
