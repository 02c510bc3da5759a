"""The blocks of quantized weights in GGUF files, and their dequantization.

Rows are uint8 tensors ``(rows, bytes)``. Every block starts or ends with float16 factors; the other
fields are small integers, often divided over several bytes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from opweave.ir.ops.checks import misfit


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
        known = ", ".join(map(repr, GGUF_BLOCKS))
        raise ValueError(f"{op}: format must be one of {known}; found {format!r}.")
    columns, size = GGUF_BLOCKS[format][:2]
    width = x.shape[-1] if x.ndim else 0
    if x.ndim == 0 or width % columns:
        raise misfit(op, "x", x, f"(..., a multiple of {columns}) for {format}")
    wanted = width // columns * size
    if weight.dtype is not torch.uint8 or weight.ndim != 2 or weight.shape[1] != wanted:
        raise misfit(
            op, "weight", weight, f"uint8, (out_features, {wanted}) for {width} columns of {format}"
        )


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
