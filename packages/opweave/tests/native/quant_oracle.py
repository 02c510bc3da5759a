"""Quantization in float64, element by element, and how results are compared."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp
from opweave.ir.ops import quant as ops

FP8 = torch.float8_e4m3fn
INT8 = torch.int8


def _fp8_values() -> NDArray[np.float64]:
    """Every non-negative float8_e4m3fn by its code, 0 to 0x7e."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.where(exponent > 0, normal, mantissa / 8 * 2.0**-6)


VALUES = _fp8_values()
MIDPOINTS = (VALUES[:-1] + VALUES[1:]) / 2


def fp8_codes(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """The codes nearest to *values*, ties to the even code, saturated; NaN is 0x7f."""
    magnitude = np.abs(values)
    lower = np.searchsorted(MIDPOINTS, magnitude, side="left")  # a midpoint counts as below
    is_tie = np.isin(magnitude, MIDPOINTS)
    codes = np.where(is_tie & (lower % 2 == 1), lower + 1, lower)
    codes = np.where(np.isnan(values), 0x7F, codes)
    sign = np.where(np.signbit(values) & ~np.isnan(values), 0x80, 0)
    return np.asarray(codes | sign, dtype=np.int64)


def int8_codes(values: NDArray[np.float64]) -> NDArray[np.int64]:
    clamped = np.clip(np.rint(values), -128, 127)
    return np.where(np.isnan(values), 0, clamped).astype(np.int64)


def codes_for(out_dtype: torch.dtype, values: NDArray[np.float64]) -> NDArray[np.int64]:
    return fp8_codes(values) if out_dtype == FP8 else int8_codes(values)


def scale_of(out_dtype: torch.dtype, largest: float, power_of_two: bool = False) -> float:
    scale = max(largest / 448, 1 / (448 * 512)) if out_dtype == FP8 else max(largest / 127, 2**-23)
    scale = float(np.float32(scale))
    if power_of_two:
        mantissa, exponent = np.frexp(scale)
        scale = float(np.ldexp(1.0, int(exponent) - (mantissa == 0.5)))
    return scale


def product(x: Tensor, inverse: Tensor | float) -> NDArray[np.float64]:
    """``x * inverse`` of float64, where float32 rounds: the reciprocal, then the product."""
    rounded = np.float64(np.float32(np.asarray(inverse)))
    found: NDArray[np.float64] = (x.numpy() * rounded).astype(np.float32).astype(np.float64)
    return found


def codes_of(quantized: Tensor) -> NDArray[np.int64]:
    """The codes, with one code for NaN."""
    if quantized.dtype == INT8:
        return quantized.numpy().astype(np.int64)
    codes = quantized.contiguous().view(torch.uint8).numpy().astype(np.int64)
    return np.where(codes & 0x7F == 0x7F, 0x7F, codes)


def assert_codes(got: Tensor, wanted: NDArray[np.int64]) -> None:
    assert np.array_equal(codes_of(got), wanted)


def share_of_neighbors(got: Tensor, wanted: Tensor) -> float:
    """The share of codes that differ; none may differ by more than one step."""
    numbers = [_ordinals(t) for t in (got, wanted)]
    difference = np.abs(numbers[0] - numbers[1])
    assert difference.max(initial=0) <= 1
    return float((difference != 0).mean()) if difference.size else 0.0


def _ordinals(quantized: Tensor) -> NDArray[np.int64]:
    """Numbers that are 1 apart for neighboring codes."""
    codes = codes_of(quantized)
    if quantized.dtype == INT8:
        return codes
    return np.where(codes & 0x80 != 0, -(codes & 0x7F), codes & 0x7F)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit, but for the sign of NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == FP8:
        bits = [t.contiguous().view(torch.uint8) for t in (a, b)]
        return torch.equal(*(torch.where(t & 0x7F == 0x7F, 0x7F, t) for t in bits))
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def layout(t: Tensor) -> list[tuple[int, int]]:
    """The strides that mean something: of dimensions with more than one element."""
    steps = zip(t.shape, t.stride(), strict=True)
    return [(size, step) for size, step in steps if size > 1] if t.numel() else []


def opcheck(name: str, *arguments: object) -> None:
    """Check a torch op of the native module; its first argument is the quantized output."""
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    out = arguments[0]
    assert isinstance(out, Tensor)
    if out.dtype != FP8:  # torch compares the tensors that an op writes, but has no code for these
        checks.append("test_schema")
    op = getattr(torch.ops.opweave_c, name).default
    torch.library.opcheck(op, arguments, test_utils=checks)


# How the ops are called

OPS = [
    ops.static_quant_fp8,
    ops.static_quant_int8,
    ops.dynamic_per_tensor_quant_fp8,
    ops.dynamic_per_token_quant_fp8,
    ops.dynamic_per_token_quant_int8,
    ops.per_token_group_quant_fp8,
]


def native(op: IrOp, *arguments: object) -> tuple[Tensor, ...]:
    return as_tuple(op.impls["native"].impl_fn(*arguments))


def ours(op: IrOp, *arguments: object) -> tuple[Tensor, ...]:
    """The implementation of opweave_c, which must be the one that is selected."""
    with ir.priority(**{op.name: ["opweave_c!"]}):
        return as_tuple(op(*arguments))


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def check(op: IrOp, *arguments: object) -> tuple[Tensor, ...]:
    """Compare with native bit by bit, strides included, and return the result."""
    found, wanted = ours(op, *arguments), native(op, *arguments)
    for mine, theirs in zip(found, wanted, strict=True):
        assert same_bits(mine, theirs), (op.name, mine, theirs)
        assert layout(mine) == layout(theirs)
    return found
