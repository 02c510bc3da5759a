"""Linear layers with low-bit weights: the definitions, against arithmetic in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.linear import linear_w8a8
from opweave.ir.ops.low_bit import (
    GGUF_BLOCKS,
    dequantized_blocks,
    linear_q,
    linear_w4a16,
    random_blocks,
)

from .workloads import FLOATS, accepts, check

FORMATS = list(GGUF_BLOCKS)
SCALES = (torch.float32, torch.float16, torch.bfloat16)


def w4_weight(weight: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """One element at a time, in float64."""
    wide = np.empty((weight.shape[0], 2 * weight.shape[1]))
    group = wide.shape[1] // scale.shape[1]
    for n, k in np.ndindex(wide.shape):
        byte = int(weight[n, k // 2])
        q = byte // 16 if k % 2 else byte % 16
        factor = float(scale[n, k // group])
        low = -8 * factor if offset is None else float(offset[n, k // group])
        wide[n, k] = q * factor + low
    return torch.from_numpy(wide)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    sums = x.double() @ weight.T
    return (sums if bias is None else sums + bias.double()).to(x.dtype)


def w4_cases(dtype: torch.dtype, scale_dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for hidden, group in [(64, 32), (128, 64), (96, 96), (40, 10), (2, 2), (576, 576)]:
        x, q, scale, offset, bias = linear_w4a16.generate_inputs(
            num_tokens=3,
            hidden_size=hidden,
            output_size=5,
            group_size=group,
            scale_dtype=scale_dtype,
            dtype=dtype,
        )
        yield x, q, scale, offset, bias
        yield x[0], q, scale, None, None
        yield x[None, :, None], q, scale, None, bias
        yield x[:0], q, scale, offset, None
    scale = torch.ones(5, 1, dtype=scale_dtype)
    no_columns = (torch.ones(3, 0, dtype=dtype), torch.ones(5, 0, dtype=torch.uint8))
    yield *no_columns, scale, scale, torch.ones(5, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
def test_w4a16_is_its_definition(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    for provider in linear_w4a16.supported_providers():
        for values in w4_cases(dtype, scale_dtype):
            if accepts(linear_w4a16, provider, values):
                x, q, scale, offset, bias = values
                found = linear_w4a16.using(f"{provider}!")(*values)
                wanted = product(x, w4_weight(q, scale, offset), bias)
                check(linear_w4a16, found, wanted, (provider, x.shape), (x,), provider)


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_are_what_gguf_reads(format: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    kind = getattr(pytest.importorskip("gguf").GGMLQuantizationType, format.upper())
    weight = random_blocks(7, 768, format)
    wanted = torch.from_numpy(quants.dequantize(weight.numpy(), kind))
    found = dequantized_blocks(weight, format, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert 0.3 < found.std() * 768**0.5 < 3


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_1"])
def test_blocks_are_what_gguf_writes(format: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    kind = getattr(pytest.importorskip("gguf").GGMLQuantizationType, format.upper())
    values = torch.randn(5, 96)
    written = torch.from_numpy(quants.quantize(values.numpy(), kind))
    error = (dequantized_blocks(written, format, torch.float32) - values).abs().max()
    assert error < (0.03 if format == "q8_0" else 0.5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_q_is_its_definition(format: str, dtype: torch.dtype) -> None:
    for provider in linear_q.supported_providers():
        for shape, rows in [((3, 256), 5), ((1, 2, 768), 33), ((512,), 4), ((0, 256), 3)]:
            x, weight = torch.randn(shape).to(dtype), random_blocks(rows, shape[-1], format)
            for bias in (None, torch.randn(rows).to(dtype)):
                values = (x, weight, bias, format)
                if accepts(linear_q, provider, values):
                    found = linear_q.using(f"{provider}!")(*values)
                    wide = dequantized_blocks(weight, format, torch.float64)
                    wanted = product(x, wide, bias)
                    check(linear_q, found, wanted, (provider, shape), (x,), provider)


X, Q, SCALE = torch.ones(2, 64), torch.ones(3, 32, dtype=torch.uint8), torch.ones(3, 2)
WRONG: list[tuple[ir.IrOp, tuple[Any, ...], str]] = [
    (linear_w4a16, (X, Q.int(), SCALE), "weight must be uint8, "),
    (linear_w4a16, (X, Q, SCALE.int()), "scale must be floating point, "),
    (linear_w4a16, (X, Q, torch.ones(3, 5)), "even number of the 64 columns; found float32, "),
    (linear_w4a16, (X, Q, torch.ones(3, 64)), "even number of the 64 columns"),
    (linear_w4a16, (X, Q, torch.ones(3)), "scale must be"),
    (linear_w4a16, (X, Q, torch.ones(3, 0)), "scale must be"),
    (linear_w4a16, (X, Q, SCALE, SCALE.half()), "offset must be None or like scale"),
    (linear_w4a16, (X, Q, SCALE, SCALE[:, :1]), "offset must be None or like scale"),
    (linear_q, (X, Q, None, "q4_2"), "format must be one of 'q8_0', .*; found 'q4_2'"),
    (linear_q, (X, Q, None, "q4_k"), r"x must be \(..., a multiple of 256\) for q4_k; found"),
    (linear_q, (X, Q, None, "q8_0"), r"weight must be uint8, \(out_features, 68\) for 64 columns"),
    (linear_q, (X, torch.ones(3, 68), None, "q8_0"), "weight must be uint8"),
]


@pytest.mark.parametrize(("op", "values", "message"), WRONG)
def test_wrong_arguments(op: ir.IrOp, values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"{op.name}: .*{message}"):
        op(*values)


# ``linear_w8a8``: against arithmetic in float64, one factor at a time; errors; graphs.

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


TOKENS, W, ONE = codes(INT8, 2, 8), codes(INT8, 6, 8), torch.ones(1)
WRONG_W8A8: list[tuple[tuple[Any, ...], str]] = [
    ((TOKENS.float(), ONE, W, ONE), "x must be int8 or float8_e4m3fn, "),
    ((TOKENS, ONE, W.to(FP8), ONE), "weight must be like x, int8 "),
    ((TOKENS, ONE, W[:, :7], ONE), r"weight must be like x, int8 \(out_features, 8\)"),
    ((TOKENS, ONE.bfloat16(), W, ONE), "x_scale must be float32 with one element"),
    ((TOKENS, torch.ones(2, 3), W, ONE), r"x_scale must be .* equal groups of x \(2, 8\)"),
    ((TOKENS, torch.ones(3, 1), W, ONE), "x_scale must be"),
    ((TOKENS, torch.ones(2), W, ONE), "x_scale must be"),
    ((TOKENS, ONE, W, ONE.half()), "scale must be float32 with one element"),
    ((TOKENS, ONE, W, torch.ones(4, 8)), r"scale must be .* that divides \(6, 8\)"),
    ((TOKENS, ONE, W, torch.ones(5)), "scale must be"),
    ((TOKENS, ONE, W, ONE, None, torch.int32), "out_dtype must be floating point"),
    ((TOKENS, ONE, W, ONE, None, FP8), "out_dtype must be floating point"),
]


@pytest.mark.parametrize(("values", "message"), WRONG_W8A8)
def test_wrong_arguments_of_w8a8(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"linear_w8a8: {message}"):
        linear_w8a8(*values)
