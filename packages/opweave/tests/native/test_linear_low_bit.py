"""Linear layers with weights of 4 bits, and in the blocks of GGUF, on every instruction set."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave.ir.ops.low_bit import (
    GGUF_BLOCKS,
    dequantized_blocks,
    dequantized_w4,
    linear_q,
    linear_w4a16,
    random_blocks,
)
from opweave.kernels.opweave_c import linear as provider
from opweave.native import loader

from .oracle import (
    CALL_PATHS,
    DTYPES,
    as_multiplied,
    assert_op_close,
    call_path,
    random,
    using_threads,
)

# Whole vectors and tails; groups that are parts of a vector, whole vectors, and neither.
SIZES = [
    (8, 8),
    (64, 32),
    (136, 8),
    (240, 24),
    (576, 64),
    (576, 576),
    (960, 96),
    (1000, 40),
    (1280, 640),
    (4096, 128),
    (8192, 32),
    (17600, 16),
]
SCALES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = 37
slow = pytest.mark.slow
Kernel = Callable[..., Tensor]


def inputs(
    tokens: int, columns: int, group: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = linear_w4a16.generate_inputs(
        num_tokens=tokens,
        hidden_size=columns,
        output_size=ROWS,
        group_size=group,
        scale_dtype=scale_dtype,
        dtype=dtype,
    )
    return made


def oracle(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    bias: Tensor | None,
    *,
    isa: str = "",
) -> Tensor:
    """In float64; rounded once. With an *isa*, with the weights of its kernel for many tokens."""
    wide = dequantized_w4(weight, scale, offset, torch.float64)
    in_tiles = wide.shape[1] // scale.shape[1] % 32 == 0
    out = x.double() @ as_multiplied(wide, x.dtype, isa if in_tiles else "").T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def call(module: ModuleType, op: str, *arguments: Any) -> Tensor:
    """Both call paths."""
    x, weight = arguments[:2]
    outs = [torch.full((*x.shape[:-1], weight.shape[0]), 7.0, dtype=x.dtype) for _ in CALL_PATHS]
    for name, out in zip(CALL_PATHS, outs, strict=True):
        call_path(module, name, op)(out, *arguments)
    assert torch.equal(outs[0].nan_to_num(9.0), outs[1].nan_to_num(9.0))
    return outs[0]


def run(module: ModuleType, *arguments: Any) -> Tensor:
    """By the kernel for few tokens."""
    return call(module, "linear_w4a16", *arguments)


def by_many(module: ModuleType, *arguments: Any, fewest: int = 0) -> Tensor:
    """By the kernel for many tokens, if there are *fewest* of them."""
    return call(module, "linear_w4a16_many", *arguments, fewest)


def by_int8(module: ModuleType, *arguments: Any) -> Tensor:
    """By the kernel for few tokens, which rounds them to 8 bits."""
    return call(module, "linear_w4a16_int8", *arguments)


def rounded_to_int8(x: Tensor) -> Tensor:
    """Return *x* rounded to 8 bits, in float64; the scales are float32."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -width % 32))
    columns = torch.unflatten(padded, -1, (-1, 32))
    largest = columns.abs().amax(-1, keepdim=True).clamp(min=2.0**-97)
    rounded = (columns * (127 / largest)).round().double() * (largest / 127).double()
    return torch.where(largest.isfinite(), rounded, columns.double()).flatten(-2)[..., :width]


def near(got: Tensor, wanted: Tensor) -> None:
    assert_op_close(linear_w4a16, got, wanted, share=0)


# Values


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def test_float32_loses_no_bits(module: ModuleType, isa: str) -> None:
    """The integers of float32 tokens have 31 bits, for magnitudes that differ by 2^7."""
    for columns, group in ((576, 64), (4096, 128)):
        x, weight, scale, offset, _ = inputs(6, columns, group, torch.float32, torch.float32)
        x *= 2.0 ** torch.randint(-7, 8, x.shape)
        for some in (None, offset):
            wide = dequantized_w4(weight, scale, some, torch.float64)
            wanted = x.double() @ wide.T
            of_float32 = relative_error(x @ wide.float().T, wanted)
            assert relative_error(run(module, x, weight, scale, some, None), wanted) < max(
                3 * of_float32, 3e-7
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_weight_in_every_place(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    """One column at a time, so that the sums are exact."""
    columns, group = 272, 16
    values = torch.arange(16, dtype=torch.uint8)
    weight = (values | values.flip(0) << 4)[:, None].expand(16, columns // 2).contiguous()
    scale = 2.0 ** torch.arange(-8, columns // group - 8).repeat(16, 1)
    x = torch.eye(columns, dtype=dtype) * torch.tensor([1.5, -2.0]).repeat(columns // 2).to(dtype)
    for offset in (None, torch.zeros_like(scale)):
        wanted = oracle(x, weight, scale, offset, None)
        assert torch.equal(run(module, x, weight, scale, offset, None), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [run, by_many, by_int8], ids=["few", "many", "int8"])
def test_what_is_not_finite_stays_in_its_token(
    module: ModuleType, isa: str, kernel: Kernel, dtype: torch.dtype
) -> None:
    used = isa if kernel is by_many else ""
    for columns, group in ((96, 32), (136, 8), (576, 576)):
        for value, place in itertools.product((torch.inf, -torch.inf, torch.nan), (0, -1)):
            x, weight, scale, offset, bias = inputs(6, columns, group, dtype, torch.float32)
            clean = kernel(module, x, weight, scale, offset, bias)
            x[3, place] = value
            got = kernel(module, x, weight, scale, offset, bias)
            seen = rounded_to_int8(x).to(torch.float64) if kernel is by_int8 else x
            near(got, oracle(seen, weight, scale, offset, bias, isa=used).to(dtype))
            assert not got[3].isfinite().all()
            got[3] = clean[3]
            assert torch.equal(got, clean)


@pytest.mark.parametrize("kernel", [run, by_many, by_int8], ids=["few", "many", "int8"])
def test_an_output_depends_on_its_token_alone(module: ModuleType, isa: str, kernel: Kernel) -> None:
    for dtype, (columns, group) in itertools.product(DTYPES, ((576, 64), (1280, 640))):
        x, weight, scale, offset, bias = inputs(70, columns, group, dtype, torch.bfloat16)
        whole = kernel(module, x, weight, scale, offset, bias)
        for tokens in (slice(0, 1), slice(3, 5), slice(31, 34), slice(60, 70)):
            got = kernel(module, x[tokens], weight, scale, offset, bias)
            assert torch.equal(got, whole[tokens])
        for rows in (slice(0, 1), slice(5, 11), slice(30, 37)):
            some = (t[rows] for t in (weight, scale, offset, bias))
            assert torch.equal(kernel(module, x, *some), whole[:, rows])
        with using_threads(2):
            assert torch.equal(kernel(module, x, weight, scale, offset, bias), whole)


# Many tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [run, by_many], ids=["few", "many"])
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=slow), pytest.param(2, marks=slow)])
def test_values(
    module: ModuleType, isa: str, first: int, kernel: Kernel, dtype: torch.dtype
) -> None:
    """Groups that the kernel for many tokens takes, and others."""
    used = isa if kernel is by_many else ""
    for place, (columns, group) in enumerate(SIZES[first:-2:3], 2 * first):
        with using_threads(1 + place % 2):
            most = 300 if columns == 576 else 33
            x, weight, scale, offset, bias = inputs(most, columns, group, dtype, SCALES[place % 3])
            for some in ((offset, bias), (None, bias.float()), (offset, None)):
                wanted = oracle(x, weight, scale, *some, isa=used)
                for tokens in {1, 2, 5, 16, 33, most}:
                    near(kernel(module, x[:tokens], weight, scale, *some), wanted[:tokens])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_tokens_of_8_bits(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    """Scales that differ, zeros and denormals, and groups of every kind."""
    for place, (columns, group) in enumerate(SIZES[:-2]):
        with using_threads(1 + place % 2):
            x, weight, scale, offset, bias = inputs(33, columns, group, dtype, SCALES[place % 3])
            x *= 2.0 ** torch.randint(-9, 10, (33, columns // 8)).repeat_interleave(8, 1)
            x[5, :8], x[6, 8:64], x[7] = 0, 1e-38, 1e-37
            for some in ((offset, bias), (None, bias.float())):
                wanted = oracle(rounded_to_int8(x), weight, scale, *some).to(dtype)
                size = wanted.abs().amax(1, keepdim=True).clamp(min=1)
                for tokens in (1, 2, 7, 33):
                    got = by_int8(module, x[:tokens], weight, scale, *some)
                    near(got / size[:tokens], wanted[:tokens] / size[:tokens])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tokens_of_8_bits_are_near_exact_ones(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    x, weight, scale, offset, bias = inputs(99, 1024, 64, dtype, torch.float32)
    wanted = oracle(x, weight, scale, offset, bias)
    got = by_int8(module, x, weight, scale, offset, bias)
    atol, rtol = linear_w4a16.get_tolerance(dtype, "opweave_c_int8")
    torch.testing.assert_close(got, wanted, atol=atol, rtol=rtol)
    assert 0 < relative_error(got, wanted.double()) < 0.008


def test_the_kernel_for_many_needs_the_fewest_tokens(module: ModuleType, isa: str) -> None:
    x, weight, scale, offset, bias = inputs(8, 576, 64, torch.bfloat16, torch.float32)
    few, many = (by_many(module, x, weight, scale, offset, bias, fewest=n) for n in (9, 8))
    assert torch.equal(few, run(module, x, weight, scale, offset, bias))
    assert torch.equal(many, few) == (isa != "amx")  # weights in bfloat16


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_widening_rounds_like_the_definition(
    module: ModuleType, isa: str, out_dtype: torch.dtype
) -> None:
    for scale_dtype in SCALES:
        for columns, group in [*SIZES, (1200, 1200)]:
            _, weight, scale, offset, _ = inputs(1, columns, group, torch.float32, scale_dtype)
            for some in (offset, None):
                out = torch.full((ROWS, columns), 7.0, dtype=out_dtype)
                for name in CALL_PATHS:
                    call_path(module, name, "widen_w4")(out, weight, scale, some)
                    wanted = dequantized_w4(weight, scale, some, torch.float32).to(out_dtype)
                    assert torch.equal(out, wanted)


def test_many_tokens_in_bfloat16_are_nearly_as_exact_as_the_definition(module: ModuleType) -> None:
    """Weights are rounded to bfloat16 there."""
    x, weight, scale, offset, _ = inputs(512, 2048, 64, torch.bfloat16, torch.float32)
    wanted = x.double() @ dequantized_w4(weight, scale, offset, torch.float64).T
    of_native = relative_error(linear_w4a16.native(x, weight, scale, offset), wanted)
    assert relative_error(provider.linear_w4a16(x, weight, scale, offset), wanted) < 2 * of_native


# Selection, errors


def test_a_module_without_the_op(module: ModuleType) -> None:
    """As after an update of the sources, until the module is built again."""
    assert not loader.has_native_op("no_such_op")
    with pytest.raises(RuntimeError, match=r"no op 'no_such_op': .* older sources. Build it again"):
        loader.native_op("no_such_op")(1)


# Linear layers with the blocks of GGUF files: every format, dtype, layout and instruction set.

FORMATS = provider.FORMATS
each_format = pytest.mark.parametrize("format", FORMATS)


def q_oracle(
    x: Tensor, weight: Tensor, bias: Tensor | None, format: str, *, isa: str = ""
) -> Tensor:
    """In float64; rounded once. With an *isa*, with the weights of its kernel for many tokens."""
    wide = dequantized_blocks(weight, format, torch.float64)
    out = x.double() @ as_multiplied(wide, x.dtype, isa).T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def run_q(
    module: ModuleType, x: Tensor, weight: Tensor, bias: Tensor | None, format: str
) -> Tensor:
    """By the kernel for few tokens."""
    return call(module, "linear_gguf", x, weight, bias, FORMATS.index(format))


def q_by_many(
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


def q_int8(
    module: ModuleType, x: Tensor, weight: Tensor, bias: Tensor | None, format: str
) -> Tensor:
    """By the kernel for few tokens, which rounds them to 8 bits."""
    return call(module, "linear_gguf_int8", x, weight, bias, FORMATS.index(format))


def int8_oracle(x: Tensor, weight: Tensor, bias: Tensor | None, format: str) -> Tensor:
    return q_oracle(rounded_to_int8(x), weight, bias, format).to(x.dtype)


def near_q(got: Tensor, wanted: Tensor) -> None:
    assert_op_close(linear_q, got, wanted, share=0)


def test_every_format_has_a_kernel() -> None:
    assert set(FORMATS) == GGUF_BLOCKS.keys()


@each_format
def test_q_of_float32_loses_no_bits(module: ModuleType, isa: str, format: str) -> None:
    x = random(6, 768, dtype=torch.float32) * 2.0 ** torch.randint(-7, 8, (6, 768))
    weight = random_blocks(ROWS, 768, format)
    wide = dequantized_blocks(weight, format, torch.float64)
    wanted = x.double() @ wide.T
    of_float32 = (x @ wide.float().T - wanted).norm()
    error = (run_q(module, x, weight, None, format) - wanted).norm()
    # At the base level, 768 terms are added one by one: about sqrt(768) roundings of 2^-24.
    room = 1e-6 if isa == "base" else 3e-7
    assert error < max(3 * of_float32, room * wanted.norm())


@each_format
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_widening_q_rounds_like_the_definition(
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
def test_q_layouts(module: ModuleType, isa: str, dtype: torch.dtype, format: str) -> None:
    weight, bias = random_blocks(ROWS, 512, format), random(ROWS, dtype=dtype)
    wide = torch.zeros(2 * ROWS, weight.shape[1] + 20, dtype=torch.uint8)
    wide[::2, 13:-7] = weight
    tokens = torch.full((4, 6, 600), torch.nan, dtype=dtype)
    tokens[..., 3:515] = random(4, 6, 512, dtype=dtype)
    x = tokens[..., 3:515].transpose(0, 1)
    wanted = q_oracle(x, weight, bias, format)
    for most in (0, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(provider, "MAX_TOKENS_Q", dict.fromkeys(DTYPES, most))
            patch.setattr(provider, "_MIN_TOKENS_AMX", None)
            found = provider.linear_q(x, wide[::2, 13:-7], bias, format)
            near_q(found, wanted)
            assert found.stride() == wanted.contiguous().stride()


@each_format
@pytest.mark.parametrize("kernel", [run_q, q_by_many, q_int8], ids=["few", "many", "int8"])
def test_tokens_and_rows_are_independent(
    module: ModuleType, isa: str, kernel: Kernel, format: str
) -> None:
    used = isa if kernel is q_by_many else ""
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
            if kernel is q_int8:
                near_q(got, int8_oracle(some, weight, None, format))
            else:
                near_q(got, q_oracle(some, weight, None, format, isa=used))
            assert not got[3].isfinite().any()
            got[3] = whole[3]
            assert torch.equal(got, whole[:5])


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [run_q, q_by_many], ids=["few", "many"])
def test_q_values(
    module: ModuleType, isa: str, kernel: Kernel, dtype: torch.dtype, format: str
) -> None:
    used = isa if kernel is q_by_many else ""
    biases = (None, random(ROWS, dtype=dtype), random(ROWS, dtype=torch.float32))
    small = (96,) if GGUF_BLOCKS[format].columns == 32 else ()
    for columns, bias in zip((*small, 256, 2048), biases, strict=False):
        with using_threads(1 + columns // 256 % 2):
            weight, x = random_blocks(ROWS, columns, format), random(300, columns, dtype=dtype)
            wanted = q_oracle(x, weight, bias, format, isa=used)
            for tokens in (1, 2, 7, 16, 33, 300):
                near_q(kernel(module, x[:tokens], weight, bias, format), wanted[:tokens])


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_values(module: ModuleType, isa: str, dtype: torch.dtype, format: str) -> None:
    """Scales that differ, zeros and denormals."""
    biases = (None, random(ROWS, dtype=dtype), random(ROWS, dtype=torch.float32))
    small = (96,) if GGUF_BLOCKS[format].columns == 32 else ()
    for columns, bias in zip((*small, 256, 2048), biases, strict=False):
        weight, x = random_blocks(ROWS, columns, format), random(33, columns, dtype=dtype)
        x *= 2.0 ** torch.randint(-9, 10, (33, columns // 32)).repeat_interleave(32, 1)
        x[5, :32], x[6, 32:64], x[7] = 0, 1e-38, 1e-37
        wanted = int8_oracle(x, weight, bias, format)
        for tokens in (1, 2, 7, 33):
            got = q_int8(module, x[:tokens], weight, bias, format)
            size = wanted.abs().amax(1, keepdim=True).clamp(min=1)[:tokens]
            near_q(got / size, wanted[:tokens] / size)


@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_int8_is_near_the_product_of_exact_tokens(
    module: ModuleType, isa: str, dtype: torch.dtype, format: str
) -> None:
    weight, x = random_blocks(ROWS, 1024, format), random(99, 1024, dtype=dtype)
    wanted = q_oracle(x, weight, None, format)
    got = q_int8(module, x, weight, None, format)
    assert relative_error(got, wanted.double()) < 0.008
    atol, rtol = linear_q.get_tolerance(dtype, "opweave_c_int8")
    torch.testing.assert_close(got, wanted, atol=atol, rtol=rtol)


@each_format
def test_int8_sums_are_exact(module: ModuleType, isa: str, format: str) -> None:
    """With scales that are powers of two, the largest integers, and every weight."""
    columns = 512
    weight = random_blocks(ROWS, columns, format)
    blocks = weight.view(ROWS, -1, GGUF_BLOCKS[format].size)
    for place in GGUF_BLOCKS[format].factors:
        blocks[..., place : place + 2] = torch.tensor([1.0]).half().view(torch.uint8)
    x = torch.randint(-127, 128, (9, columns)).float()
    x[:, ::32] = 127
    x[0], x[1] = 0, 0
    x[0, :64], x[1, -64:] = 127, -127
    wanted = q_oracle(x.double(), weight, None, format)
    assert wanted.abs().max() < 2**24
    assert torch.equal(q_int8(module, x, weight, None, format), wanted.float())


def test_the_kernel_for_many_of_q_needs_the_fewest_tokens(module: ModuleType, isa: str) -> None:
    x, weight = random(8, 512, dtype=torch.bfloat16), random_blocks(ROWS, 512, "q4_k")
    few, many = (q_by_many(module, x, weight, None, "q4_k", fewest=n) for n in (9, 8))
    assert torch.equal(few, run_q(module, x, weight, None, "q4_k"))
    assert torch.equal(many, few) == (isa != "amx")  # weights in bfloat16
