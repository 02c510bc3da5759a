"""Inputs, exact results in float64 and comparisons, which the tests of kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opweave import ir
from opweave import native as extension
from opweave.ir import IrOp
from opweave.ir.ops import quant
from opweave.ir.ops.rotary import rotary_embedding

CallPath = Callable[..., None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CALL_PATHS = ("torch_ops", "direct")
FLUSHING = ("amx", "avx512bf16", "zen4")
"""Instruction sets whose rounding to bfloat16 makes denormals zero."""


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Have torch share work between *count* threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def call_path(module: ModuleType, name: str, op: str) -> CallPath:
    if name == "direct":
        function: CallPath = getattr(module, op)
        return function
    dispatched: CallPath = getattr(torch.ops.opweave_c, op)
    return dispatched


def weight_for(kind: str, width: int, dtype: torch.dtype, seed: int = 1) -> Tensor | None:
    if kind == "none":
        return None
    values = 1 + 0.5 * torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype if kind == "same" else torch.float32)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_multiplied(wide: Tensor, dtype: torch.dtype, isa: str) -> Tensor:
    """Return *wide*, the weights in float64, as kernels for many tokens of *dtype* multiply them.

    The tiles of AMX take bfloat16 alone.
    """
    in_tiles = isa == "amx" and dtype is torch.bfloat16
    return wide.float().bfloat16().double() if in_tiles else wide


def assert_op_close(op: IrOp, got: Tensor, wanted: Tensor, *, share: float = 0.99) -> None:
    """Within the op's tolerance; in 16 bits, at least this share of the elements is equal."""
    tolerance = op.get_tolerance(wanted.dtype)
    torch.testing.assert_close(
        got, wanted, atol=tolerance.atol, rtol=tolerance.rtol, equal_nan=True
    )
    if wanted.dtype != torch.float32 and wanted.numel() >= 1000:
        same = (got == wanted) | (got.isnan() & wanted.isnan())
        assert same.double().mean() >= share


# Quantization, element by element.

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


# How the ops are called

QUANT_OPS = [
    quant.static_quant_fp8,
    quant.static_quant_int8,
    quant.dynamic_per_tensor_quant_fp8,
    quant.dynamic_per_token_quant_fp8,
    quant.dynamic_per_token_quant_int8,
    quant.per_token_group_quant_fp8,
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


# Rotation as a product of complex numbers.

MAX_POSITION = 64


def table(size: int, dtype: torch.dtype, seed: int = 7) -> Tensor:
    angles = 6.3 * torch.rand(
        MAX_POSITION, size // 2, generator=torch.Generator().manual_seed(seed)
    )
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def positions(*shape: int, seed: int = 3, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-MAX_POSITION, MAX_POSITION, shape, generator=generator).to(dtype)


def is_rounded_at_each_step(dtype: torch.dtype) -> bool:
    """Whether the active instruction set computes in this dtype itself."""
    module = extension.module()
    return module is not None and dtype == torch.float16 and module._isa() == "amx"


def rounded(
    query: Tensor, key: Tensor, where: Tensor, cache: Tensor, head_size: int, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    """The definition as it is, or in float32, where products of 16-bit numbers are exact."""
    if is_rounded_at_each_step(query.dtype):
        defined: tuple[Tensor, Tensor] = rotary_embedding.native(
            query, key, where, cache, head_size, is_neox
        )
        return defined
    cache = cache.to(query.dtype).float()
    wide = rotary_embedding.native(query.float(), key.float(), where, cache, head_size, is_neox)
    return wide[0].to(query.dtype), wide[1].to(key.dtype)


def assert_rotated_bits(got: Tensor, wanted: Tensor, isa: str) -> None:
    if isa in FLUSHING and got.dtype == torch.bfloat16:
        # It flushes denormals.
        torch.testing.assert_close(got, wanted, atol=2e-38, rtol=0, equal_nan=True)
    else:
        torch.testing.assert_close(got, wanted, atol=0, rtol=0, equal_nan=True)
