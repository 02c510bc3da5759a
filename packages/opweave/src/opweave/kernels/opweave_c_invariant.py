"""Provider ``opweave_c_invariant``: linear layers by the same C++ kernel for every batch size."""

from __future__ import annotations

import torch
from torch import Tensor

from opweave.ir import ops
from opweave.kernels.opweave_c.calls import implements, native_op, new_rows
from opweave.kernels.opweave_c.linear import (
    ACCEPTED,
    ACCEPTED_Q,
    ACCEPTED_W4A16,
    ACCEPTED_W8A8,
    ACCEPTED_W8A16,
    FORMATS,
    NEEDS,
    NEEDS_Q,
    is_blocked,
    of_blocks,
    widened,
)
from opweave.kernels.wrap import opaque

_PROVIDER = "opweave_c_invariant"

_linear = native_op("linear")
_linear_w8a16 = native_op("linear_w8a16")
_linear_w4a16 = native_op("linear_w4a16")
_linear_gguf = native_op("linear_gguf")


@implements(ops.linear, ACCEPTED, provider=_PROVIDER)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``."""
    out = new_rows(x, weight.shape[0])
    _linear(out, x, weight, bias)
    return out


@implements(ops.linear_w8a16, ACCEPTED_W8A16, provider=_PROVIDER)
def linear_w8a16(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ (scale * weight).T + bias``; the 8-bit *weight* is widened in registers."""
    out = new_rows(x, weight.shape[0])
    _linear_w8a16(out, x, weight, scale, bias)
    return out


@implements(ops.linear_w8a8, ACCEPTED_W8A8, provider=_PROVIDER)
def linear_w8a8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``(x * x_scale) @ (weight * scale).T + bias``."""
    if is_blocked(scale, weight):
        result: Tensor = _by_blocks(x, x_scale, weight, scale, bias, out_dtype)
        return result
    offsets = None if bias is None else bias.float()
    out: Tensor = linear_w8a16(widened(x, x_scale), weight, scale.contiguous(), offsets)
    return out.to(out_dtype)


@opaque(ops.linear_w8a8, "opweave_c_invariant")
def _by_blocks(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    return of_blocks(widened(x, x_scale), weight, scale, bias).to(out_dtype)


@implements(ops.linear_w4a16, ACCEPTED_W4A16, provider=_PROVIDER, needs=NEEDS)
def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``x @ (weight * scale + offset).T + bias``; 4-bit weights are widened in registers."""
    out = new_rows(x, weight.shape[0])
    _linear_w4a16(out, x, weight, scale, offset, bias)
    return out


@implements(ops.linear_q, ACCEPTED_Q, provider=_PROVIDER, needs=NEEDS_Q)
def linear_q(x: Tensor, weight: Tensor, bias: Tensor | None = None, format: str = "q8_0") -> Tensor:
    """Return ``x @ dequantized(weight).T + bias``; blocks are dequantized in registers."""
    out = new_rows(x, weight.shape[0])
    _linear_gguf(out, x, weight, bias, FORMATS.index(format))
    return out
