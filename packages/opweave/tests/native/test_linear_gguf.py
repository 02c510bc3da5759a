"""Linear layers with the blocks of GGUF files: every format, dtype, layout and instruction set."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(module: ModuleType, isa: str, dtype: torch.dtype, format: str) -> None:
    small = (32, 96, 576) if GGUF_BLOCKS[format].columns == 32 else ()
    for columns in (*small, 256, 768, 4096):
        weight = random_blocks(ROWS, columns, format)
        x = random(33, columns, dtype=dtype)
        for bias in (None, random(ROWS, dtype=dtype), random(ROWS, dtype=torch.float32)):
            wanted = oracle(x, weight, bias, format)
            for tokens in (1, 2, 3, 7, 33):
                near(run(module, x[:tokens], weight, bias, format), wanted[:tokens])


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
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_token(
    module: ModuleType, isa: str, value: float, dtype: torch.dtype, format: str
) -> None:
    weight, bias = random_blocks(ROWS, 512, format), random(ROWS, dtype=dtype)
    for place in (0, 300, 511):
        x = random(5, 512, dtype=dtype)
        clean = run(module, x, weight, bias, format)
        x[3, place] = value
        got = run(module, x, weight, bias, format)
        near(got, oracle(x, weight, bias, format))
        assert not got[3].isfinite().any()
        got[3] = clean[3]
        assert torch.equal(got, clean)


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
def test_an_output_depends_on_its_token_alone(module: ModuleType, isa: str, format: str) -> None:
    for dtype in DTYPES:
        x, weight = random(70, 512, dtype=dtype), random_blocks(ROWS, 512, format)
        whole = run(module, x, weight, None, format)
        for tokens in (slice(0, 1), slice(3, 5), slice(31, 34), slice(60, 70)):
            assert torch.equal(run(module, x[tokens], weight, None, format), whole[tokens])
        for rows in (slice(0, 1), slice(5, 11), slice(30, 37)):
            assert torch.equal(run(module, x, weight[rows], None, format), whole[:, rows])
        with using_threads(2):
            assert torch.equal(run(module, x, weight, None, format), whole)


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tokens(module: ModuleType, isa: str, dtype: torch.dtype, format: str) -> None:
    weight = random_blocks(600, 2048, format)
    for bias in (None, random(600, dtype=torch.float32)):
        x = random(64, 2048, dtype=dtype)
        near(provider.linear_q(x, weight, bias, format), oracle(x, weight, bias, format))


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_values_of_many_tokens(
    module: ModuleType, isa: str, threads: int, dtype: torch.dtype, format: str
) -> None:
    biases = (None, random(ROWS, dtype=dtype), random(ROWS, dtype=torch.float32))
    small = (32, 96, 576) if GGUF_BLOCKS[format].columns == 32 else ()
    with using_threads(threads):
        for columns, bias in zip((*small, 256, 768, 2048), 2 * biases, strict=False):
            weight, x = random_blocks(ROWS, columns, format), random(300, columns, dtype=dtype)
            wanted = oracle(x, weight, bias, format, isa=isa)
            for tokens in (1, 16, 33, 300):
                near(by_many(module, x[:tokens], weight, bias, format), wanted[:tokens])


def test_the_kernel_for_many_needs_the_fewest_tokens(module: ModuleType, isa: str) -> None:
    x, weight = random(8, 512, dtype=torch.bfloat16), random_blocks(ROWS, 512, "q4_k")
    few, many = (by_many(module, x, weight, None, "q4_k", fewest=n) for n in (9, 8))
    assert torch.equal(few, run(module, x, weight, None, "q4_k"))
    assert torch.equal(many, few) == (isa != "amx")  # weights in bfloat16


@each_format
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_many_tokens_are_independent(
    module: ModuleType, isa: str, value: float, format: str
) -> None:
    x, weight = random(70, 768, dtype=torch.bfloat16), random_blocks(ROWS, 768, format)
    whole = by_many(module, x, weight, None, format)
    for tokens in (slice(0, 1), slice(31, 34), slice(60, 70)):
        assert torch.equal(by_many(module, x[tokens], weight, None, format), whole[tokens])
    for rows in (slice(0, 1), slice(30, 37)):
        assert torch.equal(by_many(module, x, weight[rows], None, format), whole[:, rows])
    x[3, 767] = value
    got = by_many(module, x, weight, None, format)
    near(got, oracle(x, weight, None, format, isa=isa))
    assert not got[3].isfinite().any()
    got[3] = whole[3]
    assert torch.equal(got, whole)


@each_format
def test_layouts_of_many(module: ModuleType, isa: str, format: str) -> None:
    x, weight = random(24, 512, dtype=torch.bfloat16), random_blocks(ROWS, 512, format)
    wide = torch.zeros(2 * ROWS, weight.shape[1] + 20, dtype=torch.uint8)
    wide[::2, 13:-7] = weight
    tokens = torch.full((4, 6, 600), torch.nan, dtype=torch.bfloat16)
    tokens[..., 3:515] = x.view(4, 6, 512)
    strided = tokens[..., 3:515].transpose(0, 1)
    got = by_many(module, strided, wide[::2, 13:-7], None, format)
    assert torch.equal(got, by_many(module, strided.contiguous(), weight, None, format))


# Selection, errors, graphs


def accepts(*arguments: Any) -> bool:
    with ir.priority(linear_q=["opweave_c"]):
        return linear_q.dispatch(*arguments).provider == "opweave_c"


def test_selection(module: ModuleType) -> None:
    x, weight = torch.ones(2, 256), random_blocks(3, 256, "q8_0")
    assert accepts(x, weight)
    assert accepts(x[0].half(), weight, torch.ones(3), "q8_0")
    assert accepts(x, random_blocks(3, 256, "q6_k"), None, "q6_k")
    assert not accepts(x.double(), weight)
    assert not accepts(x, weight, torch.ones(3).half())
    assert not accepts(x, weight.t().contiguous().t())


def test_wrong_arguments(module: ModuleType) -> None:
    out, x, weight = torch.ones(2, 3), torch.ones(2, 256), random_blocks(3, 256, "q4_k")
    q4_k = FORMATS.index("q4_k")
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((out, x, weight, None, 6), "format must be from 0 to 5, found 6"),
        ((out, x, weight, None, -1), "format must be from 0 to 5, found -1"),
        ((out, x, weight, None, 0), r"weight must have shape \[out_features, 272\], blocks for"),
        ((out, x[:, :224], weight, None, q4_k), "weight must have shape"),
        ((out, x, weight.int(), None, q4_k), "weight must be uint8"),
        ((out, x, weight, torch.ones(2), q4_k), r"bias must have shape \[3\]"),
        ((torch.ones(2, 4), x, weight, None, q4_k), r"out must have shape \[2, 3\]"),
    ]
    for arguments, message in wrong:
        for name in CALL_PATHS:
            with pytest.raises((ValueError, RuntimeError), match=message):
                call_path(module, name, "linear_gguf")(*arguments)
            with pytest.raises((ValueError, RuntimeError), match=message):
                call_path(module, name, "linear_gguf_many")(*arguments, 1)
    with pytest.raises((ValueError, RuntimeError), match="the rows of weight"):
        module.widen_gguf(torch.ones(2, 256), weight, q4_k)


def test_opcheck(module: ModuleType) -> None:
    weight, ops = random_blocks(ROWS, 256, "q4_k"), torch.ops.opweave_c
    out, x = torch.empty(3, ROWS), random(3, 256, dtype=torch.float32)
    torch.library.opcheck(ops.linear_gguf.default, (out, x, weight, torch.ones(ROWS), 3))
    out16, x16 = out.bfloat16(), x.bfloat16()
    torch.library.opcheck(
        ops.linear_gguf_many.default, (out16, x16, weight, torch.ones(ROWS), 3, 2)
    )
    torch.library.opcheck(ops.widen_gguf.default, (torch.empty(ROWS, 256), weight, 3))


@pytest.mark.parametrize("dynamic", [False, True])
def test_full_graph(module: ModuleType, dynamic: bool) -> None:
    torch._dynamo.reset()
    weight = random_blocks(ROWS, 256, "q4_k")
    compiled = torch.compile(
        lambda x: provider.linear_q(x, weight, None, "q4_k") + 1,
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    for tokens in (3, 5, 40, 600):
        x = random(tokens, 256, dtype=torch.float32, seed=tokens)
        near(compiled(x) - 1, linear_q.native(x, weight, None, "q4_k"))
