"""Argument rules for linear layers with low-bit weights on any device.

Providers add rules for devices, for the activations, and for groups that their kernels support.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import rules
from opweave.ir.ops.gguf_blocks import GGUF_BLOCKS
from opweave.ir.ops.linear_low_bit import groups_rows
from opweave.ir.ops.linear_w8a8 import scales_tokens, scales_weight
from opweave.kernels.arguments import FLOATS

_BIAS = rules.same_dtype("x", "bias") | rules.dtype("bias", torch.float32)

W4A16 = (
    rules.ndim("weight", 2)
    & rules.ndim("scale", 2)
    & rules.unit_stride("weight", "scale", "offset", "bias")
    & rules.dtype("weight", torch.uint8)
    & rules.dtype("scale", *FLOATS)
    & rules.same_dtype("scale", "offset")
    & _BIAS
)
Q = (
    rules.ndim("weight", 2)
    & rules.unit_stride("weight", "bias")
    & rules.dtype("weight", torch.uint8)
    & _BIAS
)
W8A8 = (
    rules.dtype("x", torch.int8, torch.float8_e4m3fn)
    & rules.same_dtype("x", "weight")
    & rules.dtype("x_scale", torch.float32)
    & rules.dtype("scale", torch.float32)
    & rules.dtype("bias", *FLOATS)
    & rules.one_of("out_dtype", *FLOATS)
    & rules.ndim("weight", 2)
    & rules.unit_stride("weight", "bias")
)


def w4a16_fits(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> bool:
    """Return whether the shapes of the arguments of ``linear_w4a16`` fit each other."""
    return (
        x.shape[-1] == 2 * weight.shape[1] > 0
        and groups_rows(scale, weight)
        and (offset is None or offset.shape == scale.shape)
        and (bias is None or bias.shape == weight.shape[:1])
    )


def group_of(weight: Tensor, scale: Tensor) -> int:
    """Return the number of columns of the packed *weight* that share a scale."""
    return 2 * weight.shape[1] // scale.shape[1]


def q_fits(x: Tensor, weight: Tensor, bias: Tensor | None = None, format: str = "q8_0") -> bool:
    """Return whether the arguments of ``linear_q`` have a known format and fit each other."""
    block = GGUF_BLOCKS.get(format)
    return (
        block is not None
        and x.shape[-1] % block.columns == 0
        and weight.shape[1] == x.shape[-1] // block.columns * block.size
        and (bias is None or bias.shape == weight.shape[:1])
    )


def w8a8_fits(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> bool:
    """Return whether the shapes of the arguments of ``linear_w8a8`` fit each other."""
    return (
        x.shape[-1] == weight.shape[1] > 0
        and scales_tokens(x_scale, x)
        and scales_weight(scale, weight)
        and (bias is None or bias.shape == weight.shape[:1])
    )
