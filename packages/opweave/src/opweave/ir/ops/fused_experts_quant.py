"""Mixture of experts with quantized weights: :func:`fused_experts`, with low-bit products."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from opweave.ir.ops import quant
from opweave.ir.ops.activation import silu_and_mul
from opweave.ir.ops.arguments import misfit
from opweave.ir.ops.fused_experts import (
    Routed,
    bound_activation,
    combine,
    expert_activation,
    fused_experts,
    route,
)
from opweave.ir.ops.linear import linear_w8a8, linear_w8a16
from opweave.ir.ops.low_bit import GGUF_BLOCKS, linear_q, linear_w4a16, random_blocks
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
    routed, count, first, act, second = low_bit_experts(
        x, w13, w13_scale, w13_offset, w2, w2_scale, w2_offset, topk_weights, topk_ids,
        w13_format, w2_format, activation, expert_map, apply_router_weight_on_input,
        alpha, beta, limit, _native,
    )  # fmt: skip
    if count == 0:
        return x.new_zeros(x.shape)
    outputs = [second(expert, act(first(expert, routed.x))) for expert in range(count)]
    index = routed.experts.long()[..., None].expand(-1, -1, x.shape[1])
    return combine(torch.stack(outputs, 1).gather(1, index), routed)


class PreparedExperts(NamedTuple):
    """The arguments of a call, checked.

    Attributes:
        routed: the tokens.
        num_experts: the number of experts in the weights.
        first: the product before the activation.
        act: the activation.
        second: the product after it.
    """

    routed: Routed
    num_experts: int
    first: ExpertFunction
    act: Callable[[Tensor], Tensor]
    second: ExpertFunction


def _native(op: IrOp) -> Callable[..., Any]:
    return op.native


def _selected(op: IrOp) -> Callable[..., Any]:
    # The default of linear_q may round rows to 8 bits, which the definition of experts does not.
    call: Any = op.using("opweave_c", "triton", "native") if op is linear_q else op
    return cast("Callable[..., Any]", call)


def _product(
    weight: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    format: str,
    of_op: Callable[[IrOp], Callable[..., Any]],
) -> ExpertFunction:
    """Return the product of each expert by the linear layer of *format*."""

    def product(expert: int, rows: Tensor) -> Tensor:
        out: Tensor
        matrix = weight[expert]
        if scale is None:
            out = of_op(linear_q)(rows, matrix, None, format)
        elif format == "w4a16":
            offsets = None if offset is None else offset[expert]
            out = of_op(linear_w4a16)(rows, matrix, scale[expert], offsets)
        elif format == "w8a16":
            out = of_op(linear_w8a16)(rows, matrix, scale[expert])
        else:
            factors, use_ue8m0 = scale[expert], format == "w8a8_ue8m0"
            if factors.ndim == 2:
                group = matrix.shape[1] // factors.shape[1]
                codes, row_scale = of_op(quant.per_token_group_quant_fp8)(rows, group, use_ue8m0)
            elif matrix.dtype is torch.int8:
                codes, row_scale = of_op(quant.dynamic_per_token_quant_int8)(rows)
            else:
                codes, row_scale = of_op(quant.dynamic_per_token_quant_fp8)(rows)
            out = of_op(linear_w8a8)(codes, row_scale, matrix, factors, None, rows.dtype)
        return out

    return product


def low_bit_experts(
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
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
    alpha: float | None,
    beta: float | None,
    limit: float | None,
    of_op: Callable[[IrOp], Callable[..., Any]] = _selected,
) -> PreparedExperts:
    """Check the arguments of ``fused_experts_quant``, and return its experts.

    Args:
        of_op: returns the function to call for an op; by default, each call selects one.

    Raises:
        ValueError: a format is unknown, or shapes or dtypes do not fit.
    """
    act = bound_activation(activation, alpha, beta, limit)
    if x.ndim != 2 or not x.is_floating_point():
        raise _misfit("x", x, "floating point, (tokens, hidden)")
    if topk_ids.ndim != 2 or topk_ids.is_floating_point() or topk_ids.dtype is torch.bool:
        raise _misfit("topk_ids", topk_ids, "integers, (tokens, experts per token)")
    if topk_ids.shape[0] != x.shape[0] or topk_weights.shape != topk_ids.shape:
        expected = f"like topk_ids, with a row for each of {x.shape[0]} tokens"
        raise _misfit("topk_weights", topk_weights, expected)
    hidden = x.shape[1]
    _check_weight("w13", w13, w13_scale, w13_offset, w13_format, hidden)
    rows = w13.shape[1]
    size = rows // 2 if expert_activation(activation).gated else rows
    _check_weight("w2", w2, w2_scale, w2_offset, w2_format, size)
    if tuple(w2.shape[:2]) != (w13.shape[0], hidden):
        raise _misfit("w2", w2, f"({w13.shape[0]}, {hidden}, ...) to fit w13 and x")
    routed = route(x, topk_weights, topk_ids, len(w13), expert_map, apply_router_weight_on_input)
    first = _product(w13, w13_scale, w13_offset, w13_format, of_op)
    second = _product(w2, w2_scale, w2_offset, w2_format, of_op)
    if activation == "silu":  # the same function, for which there may be a kernel
        act = of_op(silu_and_mul)
    return PreparedExperts(routed, len(w13), first, act, second)


def _check_weight(
    name: str,
    weight: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    format: str,
    columns: int,
) -> None:
    if format not in EXPERT_FORMATS:
        formats = ", ".join(map(repr, EXPERT_FORMATS))
        raise ValueError(
            f"fused_experts_quant: {name}_format must be one of {formats}; found {format!r}."
        )
    width = _width(format, columns)
    if weight.ndim != 3 or weight.shape[2] != width:
        expected = f"(experts, rows, {width}) for {format} of {columns} columns"
        raise _misfit(name, weight, expected)
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
    x, _, _, weights, ids, activation, expert_map, *_ = fused_experts.generate_inputs(
        num_tokens=num_tokens, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_experts=num_experts, topk=topk, unrouted=unrouted, has_map=has_map, dtype=dtype,
        device=device,
    )  # fmt: skip
    formats = format, w2_format or format
    rest = block_size, weight_dtype, device
    w13 = _weights(num_experts, 2 * intermediate_size, hidden_size, formats[0], *rest)
    w2 = _weights(num_experts, hidden_size, intermediate_size, formats[1], *rest)
    return x, *w13, *w2, weights, ids, *formats, activation, expert_map, False, None, None, None


def _weights(
    experts: int, rows: int, columns: int, format: str, block_size: int,
    weight_dtype: torch.dtype, device: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the weights of all experts, their scales and offsets."""
    sizes = {"hidden_size": columns, "output_size": rows, "num_tokens": 0, "device": device}
    if format in GGUF_BLOCKS:
        blocks = [random_blocks(rows, columns, format, device) for _ in range(experts)]
        return torch.stack(blocks), None, None
    tensors: list[tuple[Tensor, ...]] = []
    for _ in range(experts):
        if format == "w4a16":
            _, q, scale, offset, _ = linear_w4a16.generate_inputs(**sizes)
            tensors.append((q, scale, offset))
        elif format == "w8a16":
            _, q, scale, _ = linear_w8a16.generate_inputs(**sizes, weight_dtype=weight_dtype)
            tensors.append((q, scale))
        else:
            _, _, q, scale, *_ = linear_w8a8.generate_inputs(
                **sizes, weight_dtype=weight_dtype, block_size=block_size
            )
            tensors.append((q, scale))
    weight, scale, *offsets = map(torch.stack, zip(*tensors, strict=True))
    return weight, scale, offsets[0] if offsets else None


# Sums in a different order with three roundings to the dtype, as for fused_experts; and a hidden
# value between two codes may get the other one.
fused_experts_quant.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)
fused_experts_quant.override_tolerance(torch.bfloat16, atol=3e-2, rtol=1.6e-2)
fused_experts_quant.override_tolerance(torch.float16, atol=4e-3, rtol=2e-3)
