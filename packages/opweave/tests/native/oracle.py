"""The definition of the norms, in float64 and row by row, arguments, and how near to come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import ModuleType

import torch
from torch import Tensor

from opweave.ir import IrOp

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


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    if x.numel() == 0:
        return out
    for row, target in zip(x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1]), strict=True):
        values = [float(v) for v in row]
        scale = 1.0 / math.sqrt(sum(v * v for v in values) / len(values) + epsilon)
        normalized = torch.tensor([v * scale for v in values], dtype=torch.float64).float()
        if weight is not None:
            normalized = normalized.to(weight.dtype) * weight
        target.copy_(normalized.to(x.dtype))
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    total = (x.double() + residual.double()).to(x.dtype)
    return rms_norm(total, weight, epsilon), total


def weight_for(kind: str, width: int, dtype: torch.dtype, seed: int = 1) -> Tensor | None:
    if kind == "none":
        return None
    values = 1 + 0.5 * torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype if kind == "same" else torch.float32)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: Tensor, wanted: Tensor) -> None:
    """Within two units in the last place; in 16 bits, nearly every element is equal.

    The share of equal elements is what tells the right sequence of roundings from another one:
    leaving one out changes about a fifth of the elements by one unit.
    """
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    unit = torch.finfo(wanted.dtype).eps
    rtol = 1e-5 if wanted.dtype == torch.float32 else 2 * unit
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=1e-6)
    if wanted.dtype != torch.float32 and wanted.numel() >= 1000:
        assert (got == wanted).double().mean() > 0.99


def with_extremes(x: Tensor, draw: Random, *, largest: float = math.inf) -> Tensor:
    """Return *x*, or, once in four times, a copy in which some elements are extreme.

    Those are NaN, infinities, zeros, the smallest numbers, and the largest, *largest* at the most.
    """
    if x.numel() == 0 or draw.random() < 0.75:
        return x
    limits = torch.finfo(x.dtype)
    largest = min(largest, limits.max)
    kinds = [math.nan, math.inf, -math.inf, largest, -largest, limits.tiny, -limits.tiny, -0.0]
    x = x.clone()  # keeps the order of the dimensions in memory
    for _ in range(draw.randrange(1, 4)):
        x[tuple(draw.randrange(size) for size in x.shape)] = draw.choice(kinds)
    return x


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
