"""Linear layers with weights and activations of 8 bits, scales that the kit does not draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.kernels.triton import launch as limits

OP = ir.ops.linear_w8a8
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def codes(device: str, *shape: int, dtype: torch.dtype) -> Tensor:
    if dtype is INT8:
        return torch.randint(-128, 128, shape, dtype=dtype, device=device)
    return (torch.randn(shape, device=device) * 100).clamp(-448, 448).to(dtype)


def scales(device: str, *shape: int) -> Tensor:
    return (0.5 + torch.rand(shape, device=device)) * 1e-3


def check(*values: Any) -> None:
    """Compare with native, which is compared with products in float64 in ir/test_linear_w8a8.py."""
    found, expected = OP.using("triton!")(*values), OP.native(*values)
    tolerance = OP.get_tolerance(found.dtype)
    torch.testing.assert_close(found, expected, **tolerance._asdict())


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("width", [1, 33, 128, 300])
def test_one_scale_of_any_shape(device: str, width: int, dtype: torch.dtype) -> None:
    x, weight = codes(device, 3, width, dtype=dtype), codes(device, 5, width, dtype=dtype)
    for shape in ((), (1,), (1, 1), (1, 1, 1)):
        check(x, scales(device, *shape), weight, scales(device, 5), None, torch.float32)
        check(x, scales(device, 3, 1), weight, scales(device, *shape[:2]), None, torch.float32)
        check(x, scales(device, 3, 1), weight, scales(device, 5, 1), None, torch.float32)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("tokens", [1, 20, 70])
def test_groups_and_blocks(device: str, tokens: int, dtype: torch.dtype) -> None:
    for width, groups, blocks in [
        (256, 2, (2, 2)),  # of 128
        (384, 3, (6, 12)),  # rows of 16, columns of 32
        (192, 2, (96, 1)),
        (192, 1, (1, 2)),
        (512, 4, None),
    ]:
        rows = 96 if blocks else 37
        check(
            codes(device, tokens, width, dtype=dtype),
            scales(device, tokens, groups),
            codes(device, rows, width, dtype=dtype),
            scales(device, *(blocks or (37,))),
            torch.randn(rows, device=device),
            torch.bfloat16,
        )


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_programs_that_share_the_columns_of_a_tile(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = (
        codes(device, 20, 1400, dtype=dtype),
        scales(device, 20, 1),
        codes(device, 37, 1400, dtype=dtype),
        scales(device, 37),
        torch.randn(37, device=device),
        torch.float32,
    )
    for processors in (1, 8, 1000):
        monkeypatch.setattr(limits, "processors", lambda where, count=processors: count)
        check(*values)


def test_the_largest_codes_do_not_overflow(device: str) -> None:
    x = torch.full((1, 65536), -128, dtype=INT8, device=device)
    one = torch.ones(1, device=device)
    found = OP.using("triton!")(x, one, x.expand(2, -1), one, None, torch.float32)
    assert found.tolist() == [[2.0**30, 2.0**30]]


def test_refusals(device: str) -> None:
    reject = OP.impls["triton"].rejection
    x, weight = codes(device, 3, 96, dtype=INT8), codes(device, 5, 96, dtype=INT8)
    arguments = OP.bind(x, scales(device, 3, 4), weight, scales(device, 5))
    assert "the size of a group of columns is not a multiple of 32" in str(reject(arguments))
    wide = codes(device, 1, 65537, dtype=INT8)
    arguments = OP.bind(wide, scales(device, 1, 1), wide, scales(device, 1))
    assert "rows have more than 65536 columns" in str(reject(arguments))
