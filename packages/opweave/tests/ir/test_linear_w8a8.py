"""``linear_w8a8``: against arithmetic in float64, one factor at a time; errors; graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.linear import linear_w8a8

from .workloads import FLOATS, accepts, check

INT8, FP8 = torch.int8, torch.float8_e4m3fn


def scale_of(scale: Tensor, row: int, column: int, shape: tuple[int, ...]) -> float:
    if scale.numel() == 1:
        return float(scale)
    if scale.ndim == 1:
        return float(scale[row])
    rows, columns = (size // count for size, count in zip(shape, scale.shape, strict=True))
    return float(scale[row // rows, column // columns])


def oracle(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: Any
) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]).float().double()
    factors = x_scale.reshape(1, 1) if x_scale.ndim != x.ndim else x_scale
    factors = factors.reshape(-1, factors.shape[-1]).expand(len(flat), -1)
    wide = weight.float().double()
    for t in range(flat.shape[0]):
        for k in range(flat.shape[1]):
            flat[t, k] *= scale_of(factors[t][None], 0, k, (1, flat.shape[1]))
    for n in range(wide.shape[0]):
        for k in range(wide.shape[1]):
            wide[n, k] *= scale_of(scale, n, k, (*wide.shape,))
    out = flat @ wide.T
    out = out if bias is None else out + bias.double()
    return out.reshape(*x.shape[:-1], weight.shape[0]).to(dtype)


def codes(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype is INT8:
        return torch.randint(-128, 128, shape, dtype=INT8)
    return (torch.randn(shape) * 100).clamp(-448, 448).to(FP8)


def factors(*shape: int, size: int) -> Tensor:
    return (0.5 + torch.rand(shape)) / (size**0.5 * 100)


def cases(narrow: torch.dtype, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for tokens, columns, rows, groups, blocks in [
        (3, 24, 5, (), ()),
        (2, 24, 5, (1,), (5,)),
        (17, 40, 6, (1,), (6, 1)),
        (4, 24, 6, (3,), (2, 6)),
        (33, 32, 32, (2,), (1, 4)),
        (5, 64, 64, (4,), (2, 4)),
        (40, 64, 64, (4,), (4, 4)),
        (0, 24, 6, (1,), (6,)),
    ]:
        x, weight = codes(narrow, tokens, columns), codes(narrow, rows, columns)
        x_scale = factors(*((tokens, *groups) if groups else ()), size=columns)
        scale = factors(*blocks, size=1)
        bias = torch.randn(rows).to(dtype)
        yield x, x_scale, weight, scale, bias, dtype
        yield x, x_scale, weight, scale, None, dtype
        if groups:
            yield x[None, :, None], x_scale[None, :, None], weight, scale, bias, dtype
            if tokens:
                yield x[0], x_scale[0], weight, scale, bias, dtype


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("narrow", [INT8, FP8], ids=str)
@pytest.mark.parametrize("provider", linear_w8a8.supported_providers())
def test_values(provider: str, narrow: torch.dtype, dtype: torch.dtype) -> None:
    for values in cases(narrow, dtype):
        if accepts(linear_w8a8, provider, values):
            found = linear_w8a8.using(f"{provider}!")(*values)
            check(linear_w8a8, found, oracle(*values), (provider, values[0].shape))
            assert found.dtype is dtype
            assert found.is_contiguous()


@pytest.mark.parametrize("provider", linear_w8a8.supported_providers())
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_largest_integers_do_not_saturate(provider: str, tokens: int) -> None:
    x, weight = (torch.full((rows, 5000), -128, dtype=INT8) for rows in (tokens, 3))
    weight[1] = 127
    weight[2, ::2] = 127
    one = torch.ones(1)
    found = linear_w8a8.using(f"{provider}!")(x, one, weight, one)
    wanted = (x.long() @ weight.long().T).float()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=64)


def test_quantized_tokens_give_nearly_the_product_of_wide_ones() -> None:
    x, weight = torch.randn(9, 256), torch.randn(32, 256)
    wanted = x @ weight.T
    for narrow, quantize, largest, error in [
        (INT8, ir.ops.dynamic_per_token_quant_int8, 127, 0.02),
        (FP8, ir.ops.dynamic_per_token_quant_fp8, 448, 0.06),
    ]:
        scale = weight.abs().amax(1) / largest
        wide = weight / scale[:, None]
        q = wide.round().to(narrow) if narrow is INT8 else wide.to(narrow)
        found = linear_w8a8(*quantize(x), q, scale)
        assert (found - wanted).norm() < error * wanted.norm()


X, W, ONE = codes(INT8, 2, 8), codes(INT8, 6, 8), torch.ones(1)
WRONG: list[tuple[tuple[Any, ...], str]] = [
    ((X.float(), ONE, W, ONE), "x must be int8 or float8_e4m3fn, "),
    ((X, ONE, W.to(FP8), ONE), "weight must be like x, int8 "),
    ((X, ONE, W[:, :7], ONE), r"weight must be like x, int8 \(out_features, 8\)"),
    ((X, ONE.bfloat16(), W, ONE), "x_scale must be float32 with one element"),
    ((X, torch.ones(2, 3), W, ONE), r"x_scale must be .* equal groups of x \(2, 8\)"),
    ((X, torch.ones(3, 1), W, ONE), "x_scale must be"),
    ((X, torch.ones(2), W, ONE), "x_scale must be"),
    ((X, ONE, W, ONE.half()), "scale must be float32 with one element"),
    ((X, ONE, W, torch.ones(4, 8)), r"scale must be .* that divides \(6, 8\)"),
    ((X, ONE, W, torch.ones(5)), "scale must be"),
    ((X, ONE, W, ONE, None, torch.int32), "out_dtype must be floating point"),
    ((X, ONE, W, ONE, None, FP8), "out_dtype must be floating point"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_wrong_arguments(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"linear_w8a8: {message}"):
        linear_w8a8(*values)
