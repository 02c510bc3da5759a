"""Linear layers with the blocks of GGUF files: every format, dtype, layout and instruction set."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave.ir.ops.low_bit import GGUF_BLOCKS, dequantized_blocks, linear_q, random_blocks
from opweave.kernels.opweave_c import linear as provider

from .oracle import (
    CALL_PATHS,
    DTYPES,
    as_multiplied,
    assert_op_close,
    call_path,
    random,
    using_threads,
)

FORMATS = provider.FORMATS
ROWS = 37
Kernel = Callable[..., Tensor]
each_format = pytest.mark.parametrize("format", FORMATS)


def oracle(x: Tensor, weight: Tensor, bias: Tensor | None, format: str, *, isa: str = "") -> Tensor:
    """In float64; rounded once. With an *isa*, with the weights of its kernel for many tokens."""
    wide = dequantized_blocks(weight, format, torch.float64)
    out = x.double() @ as_multiplied(wide, x.dtype, isa).T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def call(module: ModuleType, op: str, x: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    """Both call paths."""
    outs = [torch.full((*x.shape[:-1], weight.shape[0]), 7.0, dtype=x.dtype) for _ in CALL_PATHS]
    for name, out in zip(CALL_PATHS, outs, strict=True):
        call_path(module, name, op)(out, x, weight, *arguments)
    assert torch.equal(outs[0].nan_to_num(9.0), outs[1].nan_to_num(9.0))
    return outs[0]


def run(module: ModuleType, x: Tensor, weight: Tensor, bias: Tensor | None, format: str) -> Tensor:
    """By the kernel for few tokens."""
    return call(module, "linear_gguf", x, weight, bias, FORMATS.index(format))


def by_many(
    module: ModuleType,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    format: str,
    *,
    fewest: int = 0,
) -> Tensor:
    """By the kernel for many tokens, if there are *fewest* of them."""
    return call(module, "linear_gguf_many", x, weight, bias, FORMATS.index(format), fewest)


def near(got: Tensor, wanted: Tensor) -> None:
    assert_op_close(linear_q, got, wanted, share=0)


def test_every_format_has_a_kernel() -> None:
    assert set(FORMATS) == GGUF_BLOCKS.keys()


@each_format
def test_float32_loses_no_bits(module: ModuleType, isa: str, format: str) -> None:
    x = random(6, 768, dtype=torch.float32) * 2.0 ** torch.randint(-7, 8, (6, 768))
    weight = random_blocks(ROWS, 768, format)
    wide = dequantized_blocks(weight, format, torch.float64)
    wanted = x.double() @ wide.T
    of_float32 = (x @ wide.float().T - wanted).norm()
    error = (run(module, x, weight, None, format) - wanted).norm()
    # At the base level, 768 terms are added one by one: about sqrt(768) roundings of 2^-24.
    room = 1e-6 if isa == "base" else 3e-7
    assert error < max(3 * of_float32, room * wanted.norm())


@each_format
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_widening_rounds_like_the_definition(
    module: ModuleType, isa: str, format: str, out_dtype: torch.dtype
) -> None:
    weight = random_blocks(300, 512, format)
    wanted = dequantized_blocks(weight, format, torch.float32).to(out_dtype)
    for name in CALL_PATHS:
        out = torch.full((300, 512), 7.0, dtype=out_dtype)
        call_path(module, name, "widen_gguf")(out, weight, FORMATS.index(format))
        assert torch.equal(out, wanted)


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(module: ModuleType, isa: str, dtype: torch.dtype, format: str) -> None:
    weight, bias = random_blocks(ROWS, 512, format), random(ROWS, dtype=dtype)
    wide = torch.zeros(2 * ROWS, weight.shape[1] + 20, dtype=torch.uint8)
    wide[::2, 13:-7] = weight
    tokens = torch.full((4, 6, 600), torch.nan, dtype=dtype)
    tokens[..., 3:515] = random(4, 6, 512, dtype=dtype)
    x = tokens[..., 3:515].transpose(0, 1)
    wanted = oracle(x, weight, bias, format)
    for most in (0, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(provider, "_MAX_TOKENS_Q", dict.fromkeys(DTYPES, most))
            patch.setattr(provider, "_MIN_TOKENS_AMX", None)
            found = provider.linear_q(x, wide[::2, 13:-7], bias, format)
            near(found, wanted)
            assert found.stride() == wanted.contiguous().stride()


@each_format
@pytest.mark.parametrize("kernel", [run, by_many], ids=["few", "many"])
def test_tokens_and_rows_are_independent(
    module: ModuleType, isa: str, kernel: Kernel, format: str
) -> None:
    used = isa if kernel is by_many else ""
    for dtype in DTYPES:
        x, weight = random(70, 512, dtype=dtype), random_blocks(ROWS, 512, format)
        whole = kernel(module, x, weight, None, format)
        for tokens in (slice(0, 1), slice(3, 5), slice(31, 34), slice(60, 70)):
            assert torch.equal(kernel(module, x[tokens], weight, None, format), whole[tokens])
        for rows in (slice(0, 1), slice(5, 11), slice(30, 37)):
            assert torch.equal(kernel(module, x, weight[rows], None, format), whole[:, rows])
        with using_threads(2):
            assert torch.equal(kernel(module, x, weight, None, format), whole)
        for value, place in zip((torch.inf, -torch.inf, torch.nan), (0, 300, 511), strict=True):
            some = x[:5].clone()
            some[3, place] = value
            got = kernel(module, some, weight, None, format)
            near(got, oracle(some, weight, None, format, isa=used))
            assert not got[3].isfinite().any()
            got[3] = whole[3]
            assert torch.equal(got, whole[:5])


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [run, by_many], ids=["few", "many"])
def test_values(
    module: ModuleType, isa: str, kernel: Kernel, dtype: torch.dtype, format: str
) -> None:
    used = isa if kernel is by_many else ""
    biases = (None, random(ROWS, dtype=dtype), random(ROWS, dtype=torch.float32))
    small = (32, 96, 576) if GGUF_BLOCKS[format].columns == 32 else ()
    for columns, bias in zip((*small, 256, 768, 2048), 2 * biases, strict=False):
        with using_threads(1 + columns // 256 % 2):
            weight, x = random_blocks(ROWS, columns, format), random(300, columns, dtype=dtype)
            wanted = oracle(x, weight, bias, format, isa=used)
            for tokens in (1, 2, 7, 16, 33, 300):
                near(kernel(module, x[:tokens], weight, bias, format), wanted[:tokens])


def test_the_kernel_for_many_needs_the_fewest_tokens(module: ModuleType, isa: str) -> None:
    x, weight = random(8, 512, dtype=torch.bfloat16), random_blocks(ROWS, 512, "q4_k")
    few, many = (by_many(module, x, weight, None, "q4_k", fewest=n) for n in (9, 8))
    assert torch.equal(few, run(module, x, weight, None, "q4_k"))
    assert torch.equal(many, few) == (isa != "amx")  # weights in bfloat16
