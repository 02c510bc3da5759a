"""Linear layers with low-bit weights, against products of the dequantized weights in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.low_bit import GGUF_BLOCKS, dequantized_blocks, dequantized_w4, random_blocks
from opweave.kernels.triton import launch as limits

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
W4A16, Q = ir.ops.linear_w4a16, ir.ops.linear_q


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    sums = x.double() @ weight.T
    return (sums if bias is None else sums + bias.double()).to(x.dtype)


def check(op: ir.IrOp, arguments: tuple[Any, ...], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compare with the product of the float64 *weight*, which the kernel rounds once more."""
    found: Tensor = op.using("triton!")(*arguments)
    wanted = product(arguments[0], weight, bias)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.is_contiguous()
    tolerance = op.get_tolerance(found.dtype)
    torch.testing.assert_close(found, wanted, **tolerance._asdict())
    return found


def check_w4(x: Tensor, q: Tensor, scale: Tensor, offset: Tensor | None, bias: Any) -> Tensor:
    weight = dequantized_w4(q, scale, offset, torch.float64)
    return check(W4A16, (x, q, scale, offset, bias), weight, bias)


def w4_inputs(device: str, tokens: int, hidden: int, group: int, **options: Any) -> list[Any]:
    return list(
        W4A16.generate_inputs(
            num_tokens=tokens,
            hidden_size=hidden,
            group_size=group,
            output_size=37,
            device=device,
            **options,
        )
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("hidden", "group"),
    [
        *((640, 128), (1024, 256), (1024, 512), (96, 32), (192, 96), (576, 64)),
        *((64, 16), (64, 8), (264, 4), (600, 2)),
        *((2, 2), (30, 30), (1000, 1000), (1026, 1026)),
    ],
)
def test_w4a16_groups(device: str, hidden: int, group: int, dtype: torch.dtype) -> None:
    for tokens in (3, 40):
        x, q, scale, offset, bias = w4_inputs(device, tokens, hidden, group, dtype=dtype)
        assert scale.shape[1] == hidden // group
        check_w4(x, q, scale, offset, bias)
        check_w4(x, q, scale, None, bias.float())


@pytest.mark.parametrize("tokens", [1, 20, 100])
def test_programs_that_share_the_columns_of_a_tile(
    device: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of programs gives the same sums, up to their order, and adds the bias once."""
    values = w4_inputs(device, tokens, 1032, 8)
    expected = check_w4(*values)
    for processors in (1, 8, 1000):
        monkeypatch.setattr(limits, "processors", lambda where, count=processors: count)
        torch.testing.assert_close(check_w4(*values), expected, atol=1e-5, rtol=1e-5)
        check_w4(*values[:4], None)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 2], ids=["x", "scale"])
def test_w4a16_keeps_numbers_that_are_not_finite(device: str, number: float, place: int) -> None:
    """A step that ends after the row must not multiply them by zero."""
    x, q, scale, _, _ = w4_inputs(device, 3, 100, 100)
    values = [x.abs(), torch.full_like(q, 0x99), scale]
    values[place].view(-1)[1] = number
    found, expected = W4A16.using("triton!")(*values), W4A16.native(*values)
    assert found.isfinite().sum() == (2 * 37 if place == 0 else 3 * 36)
    torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-4, rtol=1e-5)


def test_w4a16_refuses_other_groups(device: str) -> None:
    x, q, scale, offset, bias = w4_inputs(device, 3, 80, 20)
    reason = W4A16.impls["triton"].rejection(W4A16.bind(x, q, scale, offset, bias))
    assert reason is not None
    assert "the columns of a group are neither a multiple of 32 nor a power of two" in reason


def check_q(x: Tensor, weight: Tensor, bias: Tensor | None, format: str) -> Tensor:
    wide = dequantized_blocks(weight, format, torch.float64)
    return check(Q, (x, weight, bias, format), wide, bias)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("format", GGUF_BLOCKS)
def test_q_of_every_tile(device: str, format: str, dtype: torch.dtype) -> None:
    for tokens, hidden in ((1, 256), (16, 768), (20, 512), (70, 256)):
        x = torch.randn(tokens, hidden, device=device).to(dtype)
        weight = random_blocks(37, hidden, format, device)
        bias = torch.randn(37, device=device)
        check_q(x, weight, bias, format)
        check_q(x, weight, bias.to(dtype), format)
        check_q(x, weight, None, format)


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("hidden", [32, 96, 416])
def test_q_rows_of_few_blocks(device: str, format: str, hidden: int) -> None:
    check_q(
        torch.randn(3, hidden, device=device),
        random_blocks(5, hidden, format, device),
        None,
        format,
    )


@pytest.mark.parametrize("format", GGUF_BLOCKS)
def test_q_blocks_of_any_alignment(device: str, format: str) -> None:
    weight = random_blocks(37, 512, format, device)
    wide = torch.full((74, weight.shape[1] + 7), 255, dtype=torch.uint8, device=device)
    x = torch.randn(2, 2, 512, device=device)
    expected = check_q(x, weight, None, format)
    assert torch.equal(check_q(x, wide[::2, 3:-4].copy_(weight), None, format), expected)


def test_q_keeps_infinite_factors_in_their_rows(device: str) -> None:
    weight = random_blocks(37, 96, "q4_0", device)
    weight[1, 18:20] = torch.tensor([0, 0x7C], dtype=torch.uint8, device=device)
    found = Q.using("triton!")(torch.randn(3, 96, device=device), weight, None, "q4_0")
    assert found.isfinite().sum() == 3 * 36
    assert not found[:, 1].isfinite().any()


# Linear layers with weights and activations of 8 bits, scales that the kit does not draw.

OP = ir.ops.linear_w8a8
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def codes(device: str, *shape: int, dtype: torch.dtype) -> Tensor:
    if dtype is INT8:
        return torch.randint(-128, 128, shape, dtype=dtype, device=device)
    return (torch.randn(shape, device=device) * 100).clamp(-448, 448).to(dtype)


def scales(device: str, *shape: int) -> Tensor:
    return (0.5 + torch.rand(shape, device=device)) * 1e-3


def check_w8a8(*values: Any) -> None:
    """Compare with native, which ir/test_linear_low_bit.py compares with products in float64."""
    found, expected = OP.using("triton!")(*values), OP.native(*values)
    tolerance = OP.get_tolerance(found.dtype)
    torch.testing.assert_close(found, expected, **tolerance._asdict())


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("width", [1, 33, 128, 300])
def test_one_scale_of_any_shape(device: str, width: int, dtype: torch.dtype) -> None:
    x, weight = codes(device, 3, width, dtype=dtype), codes(device, 5, width, dtype=dtype)
    for shape in ((), (1,), (1, 1), (1, 1, 1)):
        check_w8a8(x, scales(device, *shape), weight, scales(device, 5), None, torch.float32)
        check_w8a8(x, scales(device, 3, 1), weight, scales(device, *shape[:2]), None, torch.float32)
        check_w8a8(x, scales(device, 3, 1), weight, scales(device, 5, 1), None, torch.float32)


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
        check_w8a8(
            codes(device, tokens, width, dtype=dtype),
            scales(device, tokens, groups),
            codes(device, rows, width, dtype=dtype),
            scales(device, *(blocks or (37,))),
            torch.randn(rows, device=device),
            torch.bfloat16,
        )


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_w8a8_programs_that_share_the_columns_of_a_tile(
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
        check_w8a8(*values)


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
