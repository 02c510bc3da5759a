"""Linear layers with weights of about four bits: groups of int4, and blocks of GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from opweave.ir.ops.arguments import misfit
from opweave.ir.ops.linear import linear
from opweave.ir.registry import register_op

# The blocks of quantized weights in GGUF files, and their dequantization.
#
# Rows are uint8 tensors ``(rows, bytes)``. Every block starts or ends with float16 factors; the
# other fields are small integers, often divided over several bytes.


class GgufBlock(NamedTuple):
    """The layout of a block.

    Attributes:
        columns: the number of weights.
        size: in bytes.
        dequantize: returns the weights ``(blocks, columns)`` of blocks ``(blocks, size)``.
        factors: the positions of the float16 factors, and their typical size relative to weights.
    """

    columns: int
    size: int
    dequantize: Callable[[Tensor, torch.dtype], Tensor]
    factors: dict[int, float]


def dequantized_blocks(weight: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Return the weights ``(rows, columns)`` of the blocks in each row of *weight*."""
    block = GGUF_BLOCKS[format]
    count = weight.shape[1] // block.size
    blocks = weight.reshape(weight.shape[0] * count, block.size)
    return block.dequantize(blocks, dtype).reshape(weight.shape[0], count * block.columns)


def check_blocks(op: str, x: Tensor, weight: Tensor, format: str) -> None:
    """Raise ValueError unless rows of *weight* consist of the blocks for the columns of *x*."""
    if format not in GGUF_BLOCKS:
        formats = ", ".join(map(repr, GGUF_BLOCKS))
        raise ValueError(f"{op}: format must be one of {formats}; found {format!r}.")
    columns, size = GGUF_BLOCKS[format][:2]
    width = x.shape[-1] if x.ndim else 0
    if x.ndim == 0 or width % columns:
        raise misfit(op, "x", x, f"(..., a multiple of {columns}) for {format}")
    row_bytes = width // columns * size
    if weight.dtype is not torch.uint8 or weight.ndim != 2 or weight.shape[1] != row_bytes:
        expected = f"uint8, (out_features, {row_bytes}) for {width} columns of {format}"
        raise misfit(op, "weight", weight, expected)


def random_blocks(rows: int, columns: int, format: str, device: str = "cpu") -> Tensor:
    """Return random weights, as large as those of a linear layer usually are."""
    block = GGUF_BLOCKS[format]
    count = columns // block.columns
    blocks = torch.randint(256, (rows, count, block.size), dtype=torch.uint8, device=device)
    for place, size in block.factors.items():
        factor = (0.5 + torch.rand(rows, count, 1, device=device)) * size / columns**0.5
        blocks[..., place : place + 2] = factor.half().view(torch.uint8)
    return blocks.flatten(1)


def _float16(blocks: Tensor, place: int, dtype: torch.dtype) -> Tensor:
    """Return the float16 numbers at byte *place*, as a column of *dtype*."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).to(dtype)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low four bits of all bytes of the last dimension, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q8_0(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return blocks[:, 2:].view(torch.int8).to(dtype) * _float16(blocks, 0, dtype)


def _q4_0(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return (_nibbles(blocks[:, 2:]).to(dtype) - 8) * _float16(blocks, 0, dtype)


def _q4_1(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    scale, offset = _float16(blocks, 0, dtype), _float16(blocks, 2, dtype)
    return _nibbles(blocks[:, 4:]).to(dtype) * scale + offset


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight factors and the eight minima of 12 bytes.

    The first four of each are the low six bits of bytes 0 to 3 and 4 to 7. The others have their
    high two bits there, and their low four bits in bytes 8 to 11.
    """
    first, second, rest = torch.split(packed, 4, dim=-1)
    factors = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=-1)
    minima = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=-1)
    return factors, minima


def _scaled(blocks: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale eight groups of 32 *values* ``(blocks, 8, 32)`` of a block of q4_k or q5_k."""
    factors, minima = _six_bits(blocks[:, 4:16])
    scale = _float16(blocks, 0, dtype) * factors.to(dtype)
    least = _float16(blocks, 2, dtype) * minima.to(dtype)
    return (scale[..., None] * values.to(dtype) - least[..., None]).flatten(1)


def _q4_k(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    values = _nibbles(torch.unflatten(blocks[:, 16:], 1, (4, 32)))
    return _scaled(blocks, values.view(-1, 8, 32), dtype)


def _q5_k(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    low = _nibbles(torch.unflatten(blocks[:, 48:], 1, (4, 32))).view(-1, 8, 32)
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[:, None, 16:48] >> bits & 1
    return _scaled(blocks, low | (high << 4), dtype)


def _q6_k(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    low = _nibbles(torch.unflatten(blocks[:, :128], 1, (2, 64))).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3
    values = (low | (high << 4)).view(-1, 16, 16).to(dtype) - 32
    factors = blocks[:, 192:208].view(torch.int8).to(dtype)
    scale = _float16(blocks, 208, dtype) * factors
    return (scale[..., None] * values).flatten(1)


GGUF_BLOCKS = {
    "q8_0": GgufBlock(32, 34, _q8_0, {0: 1 / 74}),
    "q4_0": GgufBlock(32, 18, _q4_0, {0: 1 / 5}),
    "q4_1": GgufBlock(32, 20, _q4_1, {0: 1 / 5, 2: -7.5 / 5}),
    "q4_k": GgufBlock(256, 144, _q4_k, {0: 1 / 270, 2: 7.5 / 270}),
    "q5_k": GgufBlock(256, 176, _q5_k, {0: 1 / 550, 2: 15.5 / 550}),
    "q6_k": GgufBlock(256, 210, _q6_k, {208: 1 / 1350}),
}


# The linear layers.


@register_op(autocast=False)
def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``x @ (q * scale + offset).T + bias`` with 4-bit ``q``, in float32, rounded once.

    Every row of the weight is divided into groups of the same even number of columns, each with its
    own scale and offset. The provider ``opweave_c_int8`` rounds ``x`` as for ``linear_q``.

    Args:
        x: ``(..., in_features)``, floating point; float64 is computed in float64.
        weight: ``(out_features, in_features / 2)``, uint8: two values of 0 to 15 per byte. The low
            four bits belong to the even column.
        scale: ``(out_features, groups)``, floating point.
        offset: shape and dtype of ``scale``; the value for which ``q`` is zero. None for
            ``-8 * scale``, symmetric int4.
        bias: ``(out_features,)``, any floating dtype, or None.

    Returns:
        ``(..., out_features)`` in the dtype of ``x``.

    Raises:
        ValueError: the dtype or shape of ``weight``, ``scale`` or ``offset`` is not supported.

    Source: GPTQ, arXiv:2210.17323; AWQ, arXiv:2306.00978.
    """
    op = "linear_w4a16"
    if weight.dtype is not torch.uint8 or weight.ndim != 2:
        raise misfit(op, "weight", weight, "uint8, (out_features, in_features / 2)")
    if not scale.is_floating_point() or not groups_rows(scale, weight):
        groups = f"groups of an equal, even number of the {2 * weight.shape[1]} columns"
        expected = f"floating point, ({weight.shape[0]}, groups), with {groups}"
        raise misfit(op, "scale", scale, expected)
    if offset is not None and (offset.dtype != scale.dtype or offset.shape != scale.shape):
        raise misfit(op, "offset", offset, "None or like scale")
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = dequantized_w4(weight, scale, offset, y.dtype)
    return functional.linear(y, wide, None if bias is None else bias.to(y.dtype)).to(x.dtype)


def dequantized_w4(
    weight: Tensor, scale: Tensor, offset: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the weight of :func:`linear_w4a16` as numbers of *dtype*."""
    rows, groups = scale.shape
    values = torch.stack((weight & 15, weight >> 4), dim=-1).to(dtype)
    values = values.reshape(rows, groups, 2 * weight.shape[1] // groups)
    wide_scale = scale.to(dtype)[..., None]
    if offset is None:
        return ((values - 8) * wide_scale).flatten(1)
    return (values * wide_scale + offset.to(dtype)[..., None]).flatten(1)


def groups_rows(scale: Tensor, weight: Tensor) -> bool:
    """Whether *scale* divides the rows of the packed *weight* into groups of whole bytes."""
    return (
        scale.ndim == 2
        and scale.shape[0] == weight.shape[0]
        and scale.shape[1] > 0
        and weight.shape[1] % scale.shape[1] == 0
    )


@register_op(autocast=False)
def linear_q(x: Tensor, weight: Tensor, bias: Tensor | None = None, format: str = "q8_0") -> Tensor:
    """``x @ dequantized(weight).T + bias`` with blocks of a GGUF file, in float32, rounded once.

    The CPU's default provider, ``opweave_c_int8``, first rounds ``x``, if it has few rows of 16-bit
    floats, as llama.cpp does: 32 columns become integers from -127 to 127 times a float32 scale,
    their largest magnitude / 127. Sums of size 1 then have errors of 0.0055 (root mean square);
    its tolerance is 0.04 + 1 %.

    Args:
        x: ``(..., in_features)``, floating point; float64 is computed in float64.
        weight: ``(out_features, bytes)``, uint8: the blocks of each row as the file has them.
        bias: ``(out_features,)``, any floating dtype, or None.
        format: ``"q4_0"``, ``"q4_1"`` or ``"q8_0"``, with blocks of 32 columns; ``"q4_k"``,
            ``"q5_k"`` or ``"q6_k"``, with blocks of 256.

    Returns:
        ``(..., out_features)`` in the dtype of ``x``.

    Raises:
        ValueError: the format is unknown, or ``weight`` does not consist of whole blocks of
            ``in_features`` columns.

    Source: the GGUF format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the rounding
    of ``x``, ``quantize_row_q8_0`` in ggml.
    """
    check_blocks("linear_q", x, weight, format)
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = dequantized_blocks(weight, format, y.dtype)
    return functional.linear(y, wide, None if bias is None else bias.to(y.dtype)).to(x.dtype)


@linear_w4a16.register_input_generator
def _linear_w4a16_inputs(
    num_tokens: int = 8,
    hidden_size: int = 64,
    output_size: int = 0,
    group_size: int = 32,
    scale_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A *group_size* that does not divide the *hidden_size* stands for one group per row."""
    if hidden_size % 2:
        raise ValueError(f"linear_w4a16: hidden_size must be even; found {hidden_size}.")
    x, weight, bias = linear.generate_inputs(
        num_tokens=num_tokens, hidden_size=hidden_size, output_size=output_size, device=device
    )
    divides = group_size % 2 == 0 and hidden_size % group_size == 0
    grouped = weight.unflatten(1, (-1, group_size if divides else hidden_size))
    least, largest = grouped.aminmax(dim=-1)
    scale = ((largest - least) / 15).clamp(min=1e-6).to(scale_dtype)
    offset = least.to(scale_dtype)
    q = ((grouped - offset[..., None].float()) / scale[..., None].float()).round().clamp(0, 15)
    q = q.to(torch.uint8).flatten(1)
    return x.to(dtype), q[:, ::2] | (q[:, 1::2] << 4), scale, offset, bias.to(dtype)


@linear_q.register_input_generator
def _linear_q_inputs(
    num_tokens: int = 8,
    hidden_size: int = 256,
    output_size: int = 64,
    format: str = "q8_0",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, str]:
    if hidden_size % GGUF_BLOCKS[format].columns:
        raise ValueError(f"linear_q: {hidden_size} columns are not whole blocks of {format}.")
    x = torch.randn(num_tokens, hidden_size, device=device)
    weight = random_blocks(output_size, hidden_size, format, device)
    return x.to(dtype), weight, torch.randn(output_size, device=device).to(dtype), format


# Sums in a different order, as for linear. Weights may be rounded to bfloat16 before the product:
# with these inputs, that moves sums by 0.002 to 0.0035 (standard deviation of a row).
for _op in (linear_w4a16, linear_q):
    _op.override_tolerance(torch.float32, atol=1e-4, rtol=1e-5)
    _op.override_tolerance(torch.bfloat16, atol=2e-2, rtol=1.6e-2)
    _op.override_tolerance(torch.float16, atol=1e-2, rtol=2e-3)
    # With x rounded to 8 bits; seven times the root-mean-square error of sums of size 1.
    for _dtype in (torch.bfloat16, torch.float16):
        _op.override_tolerance(_dtype, atol=4e-2, rtol=1e-2, provider="opweave_c_int8")
