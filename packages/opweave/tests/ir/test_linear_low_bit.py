"""Linear layers with low-bit weights: the definitions, against arithmetic in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opweave import ir
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
                check(linear_w4a16, found, wanted, (provider, x.shape), (x,))


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
                    check(linear_q, found, wanted, (provider, shape), (x,))


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
