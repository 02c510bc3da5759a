"""Linear layers with weights and activations of 8 bits, against products in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.kernels.triton import launch as limits

OP = ir.ops.linear_w8a8
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def codes(device: str, *shape: int, dtype: torch.dtype) -> Tensor:
    if dtype is INT8:
        return torch.randint(-128, 128, shape, dtype=dtype, device=device)
    return (torch.randn(shape, device=device) * 100).clamp(-448, 448).to(dtype)


def scales(device: str, *shape: int) -> Tensor:
    return (0.5 + torch.rand(shape, device=device)) * 1e-3


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return a float64 scale for every element of a matrix, one element at a time."""
    if scale.numel() == 1:
        return scale.double().reshape(1, 1).expand(rows, columns)
    wide = scale[:, None] if scale.ndim == 1 else scale
    block = rows // wide.shape[0], columns // wide.shape[1]
    return torch.stack(
        [
            torch.stack([wide[i // block[0], j // block[1]].double() for j in range(columns)])
            for i in range(rows)
        ]
    )


def wanted(values: tuple[Any, ...]) -> Tensor:
    x, x_scale, weight, scale, bias, out_dtype = values
    flat = x.reshape(-1, x.shape[-1]).double()
    own = x_scale if x_scale.ndim != x.ndim else x_scale.reshape(-1, x_scale.shape[-1])
    if flat.shape[0]:
        flat = flat * spread(own, *flat.shape)
    sums = flat @ (weight.double() * spread(scale, *weight.shape)).T
    sums = sums if bias is None else sums + bias.double()
    return sums.reshape(*x.shape[:-1], weight.shape[0]).to(out_dtype)


def check(*values: Any) -> Tensor:
    found: Tensor = OP.using("triton!")(*values)
    expected = wanted(values)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    tolerance = OP.get_tolerance(found.dtype)
    torch.testing.assert_close(found, expected, **tolerance._asdict())
    return found


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("tokens", [1, 17, 65])
def test_a_scale_for_each_token_and_row(device: str, tokens: int, dtype: torch.dtype) -> None:
    x = codes(device, tokens, 160, dtype=dtype)
    weight = codes(device, 37, 160, dtype=dtype)
    bias = torch.randn(37, device=device)
    for out_dtype in FLOATS:
        for own in (None, bias, bias.to(out_dtype), bias.half()):
            check(x, scales(device, tokens, 1), weight, scales(device, 37), own, out_dtype)


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


@pytest.mark.parametrize("shape", [(160,), (1, 160), (2, 3, 160), (0, 160), (2, 0, 160)])
def test_dimensions(device: str, shape: tuple[int, ...]) -> None:
    x = codes(device, *shape, dtype=INT8)
    weight = codes(device, 37, 160, dtype=INT8)
    for groups in (1, 5):
        x_scale = scales(device, *shape[:-1], groups)
        check(x, x_scale, weight, scales(device, 37), None, torch.float32)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_rows_inside_wider_rows(device: str, dtype: torch.dtype) -> None:
    def inside(t: Tensor) -> Tensor:
        shape = 2 * t.shape[0], t.shape[1] + 7
        return codes(device, *shape, dtype=dtype)[::2, 3:-4].copy_(t)

    x, weight = codes(device, 5, 160, dtype=dtype), codes(device, 37, 160, dtype=dtype)
    x_scale, scale = scales(device, 5, 1), scales(device, 37)
    expected = check(x, x_scale, weight, scale, None, torch.float32)
    found = check(inside(x), x_scale, inside(weight), scale, None, torch.float32)
    assert torch.equal(found, expected)


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
