"""Quantization gives native's bits: every 16-bit number, ties between codes, and any rows."""

from __future__ import annotations

import math
import random as python_random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir import IrOp
from opweave.ir.ops import quant as ops

from . import oracle
from .oracle import DTYPES, FP8, INT8, assert_codes, check, native, ours, random, same_bits
from .oracle import QUANT_OPS as OPS

# Conversion


def hard_values() -> Tensor:
    """Floats around every rounding decision: midpoints, limits, denormals, infinity, NaN."""
    points = np.concatenate([oracle.VALUES, oracle.MIDPOINTS, [464, 480, 1e4, 3e38, 1e-40]])
    exact = torch.tensor(points, dtype=torch.float32)
    above = torch.nextafter(exact, torch.tensor(torch.inf))
    below = torch.nextafter(exact, torch.tensor(-torch.inf))
    halves = torch.arange(-300, 300) / 2
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    positive = torch.cat([exact, above, below])
    return torch.cat([positive, -positive, halves, halves.nextafter(special[:1]), special])


def every_float(step: int) -> Tensor:
    bits = torch.arange(-(2**31), 2**31, step, dtype=torch.int64).to(torch.int32)
    return bits.view(torch.float32)


def check_conversion(module: ModuleType, x: Tensor) -> None:
    for dtype in (FP8, INT8):
        out = torch.empty(x.shape, dtype=dtype)
        module.static_quant(out, x, torch.ones(1))
        wanted = oracle.codes_for(dtype, x.double().numpy())
        found = out.view(torch.uint8).numpy() if dtype == FP8 else out.numpy()
        if dtype == FP8:
            found = np.where(found & 0x7F == 0x7F, 0x7F, found)
        assert np.array_equal(found, wanted)
    q = ops.static_quant_fp8.impls["native"].impl_fn(x, torch.ones(1))
    out = torch.empty(x.shape, dtype=FP8)
    module.static_quant(out, x, torch.ones(1))
    assert same_bits(out, q)


def every_number(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of 16 bits."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def many_scales() -> list[float]:
    """Powers of two, by which many products are ties; any; and those that no number is made for."""
    powers = [2.0**power for power in range(-30, 28)]
    limits = [float.fromhex("0x1.2p-8"), 2.0**7]  # of the scales with steps in float16
    near = [
        float(np.nextafter(np.float32(power), np.float32(towards)))
        for power in (*powers[::4], *limits)
        for towards in (0, math.inf)
    ]
    rough = [power * factor for power in powers[::3] for factor in (1.5, 1.25, 1 / 3)]
    drawn = [2 ** python_random.uniform(-24, 22) for _ in range(60)]
    extreme = [1e-45, 1e-38, 2.0**-101, 2.0**-99, 2.0**99, 2.0**101, 3e38, 0.0, math.inf, math.nan]
    return [*powers, *near, *rough, *drawn, *extreme, -0.5, -3.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_by_many_scales(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    x = every_number(dtype).view(-1, 1024)
    for scale in many_scales():
        check(ops.static_quant_fp8, x, torch.tensor([scale]))


@pytest.mark.parametrize("op", [ops.dynamic_per_token_quant_fp8, ops.dynamic_per_token_quant_int8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_below_the_largest(
    module: ModuleType, isa: str, dtype: torch.dtype, op: IrOp
) -> None:
    numbers = every_number(dtype)
    numbers = numbers[numbers.isfinite()]
    for _ in range(12):
        most = 2 ** python_random.uniform(-16, 16)
        below = numbers[numbers.abs() <= most]
        rows = len(below) // 1024
        x = below[torch.randperm(len(below))[: rows * 1024]].view(rows, 1024)
        check(op, x)
        if op is ops.dynamic_per_token_quant_fp8:
            check(op, x, torch.tensor([most / 2]))  # an upper bound


def test_hard_values(module: ModuleType, isa: str) -> None:
    check_conversion(module, hard_values())
    check_conversion(module, every_float(30011))


@pytest.mark.slow
def test_many_floats(module: ModuleType, isa: str) -> None:
    check_conversion(module, every_float(251))


def test_the_sign_of_nan_stays(module: ModuleType, isa: str) -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).repeat(40)
    for sign, code in ((0, 0x7F), (-(2**31), 0xFF)):
        out = torch.empty(bits.shape, dtype=FP8)
        module.static_quant(out, (bits + sign).view(torch.float32), torch.ones(1))
        assert (out.view(torch.uint8) == code).all()


def test_neighbors_do_not_mix(module: ModuleType, isa: str) -> None:
    """Every place among the vectors that are converted at once, in rows of every length."""
    values = torch.tensor([0.0, -1.0, 500.0, -(2.0**-9), torch.nan, 3.3, torch.inf, -448.0])
    for width in range(1, 140):
        x = values[(torch.arange(3 * width) * 5 + width) % len(values)].view(3, width)
        for op in (ops.static_quant_fp8, ops.static_quant_int8):
            check(op, x, torch.ones(1))


# Values


def layouts(dtype: torch.dtype) -> list[Tensor]:
    wide = random(3, 4, 60, dtype=dtype) * 3
    return [
        random(3, 5, 517, dtype=dtype),
        random(2, 5125, dtype=dtype),
        random(64, dtype=dtype),
        wide[..., :37],
        wide.transpose(0, 1)[..., 5:40],
        random(2, 3, 4, 5, dtype=dtype).permute(2, 0, 1, 3),
        wide[:, ::2, :37],
        wide[:1].expand(3, 4, 60),
        random(4, 1, 6, dtype=dtype).expand(4, 3, 6),
        random(4, 8, dtype=dtype)[:, :1],
        wide[:0],
        wide[..., :0],
    ]


def arguments_for(op: IrOp, x: Tensor) -> list[tuple[Any, ...]]:
    if op in (ops.static_quant_fp8, ops.static_quant_int8):
        return [(x, torch.tensor([0.02]))]
    if op is ops.per_token_group_quant_fp8:
        return [(x, 16, False), (x, 7, True)]
    return [(x,)]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_bits_and_strides_are_those_of_native(module: ModuleType, isa: str, op: IrOp) -> None:
    for dtype in DTYPES:
        for x in layouts(dtype):
            for arguments in arguments_for(op, x):
                check(op, *arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [FP8, INT8], ids=str)
def test_the_definition_of_scales_by_row(out_dtype: torch.dtype, dtype: torch.dtype) -> None:
    op = {FP8: ops.dynamic_per_token_quant_fp8, INT8: ops.dynamic_per_token_quant_int8}[out_dtype]
    x = random(7, 769, dtype=dtype) * 3
    out, scale = native(op, x)
    for row, q, s in zip(x.double(), out, scale.flatten(), strict=True):
        assert s.item() == oracle.scale_of(out_dtype, row.abs().max().item())
        assert_codes(q, oracle.codes_for(out_dtype, oracle.product(row, 1 / s.item())))
    if out_dtype == FP8:
        out, scale = native(ops.dynamic_per_tensor_quant_fp8, x)
        assert scale.item() == oracle.scale_of(FP8, x.double().abs().max().item())
        assert_codes(out, oracle.fp8_codes(oracle.product(x.double(), 1 / scale.item())))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_definition_of_scales_by_group(dtype: torch.dtype, power_of_two: bool) -> None:
    for shape, size in [((3, 512), 128), ((8, 513), 64), ((6, 50), 7), ((5, 9), 100), ((1, 4), 1)]:
        x = random(*shape, dtype=dtype) * 3
        out, scale = native(ops.per_token_group_quant_fp8, x, size, power_of_two)
        for row, q, s in zip(x.double(), out, scale, strict=True):
            for g, of_group in enumerate(s.tolist()):
                part = slice(g * size, (g + 1) * size)
                assert of_group == oracle.scale_of(FP8, row[part].abs().max().item(), power_of_two)
                quotient = (row[part].numpy() / of_group).astype(np.float32).astype(np.float64)
                assert_codes(q[part], oracle.fp8_codes(quotient))


@pytest.mark.parametrize("out_dtype", [FP8, INT8], ids=str)
def test_blocks_of_given_scales(module: ModuleType, isa: str, out_dtype: torch.dtype) -> None:
    op = {FP8: ops.static_quant_fp8, INT8: ops.static_quant_int8}[out_dtype]
    for dtype in DTYPES:
        x = random(6, 8, 96, dtype=dtype)
        for blocks in [(), (1, 1), (48, 1), (1, 96), (48, 96), (48, 3), (4, 2), (1, 32), (24, 1)]:
            scale = 0.01 + 0.05 * torch.rand(blocks, generator=torch.Generator().manual_seed(1))
            [out] = check(op, x, scale)
            a, b = blocks or (1, 1)
            wide = scale.reshape(a, b).double().repeat_interleave(48 // a, 0)
            wide = wide.repeat_interleave(96 // b, 1)
            exact = oracle.product(x.double().view(48, 96), 1 / wide)
            assert_codes(out.reshape(48, 96), oracle.codes_for(out_dtype, exact))


def test_strided_out_is_written_alone(module: ModuleType, isa: str) -> None:
    x = random(6, 4, 37, dtype=torch.bfloat16)
    base = torch.full((4, 6, 61), 9, dtype=INT8)
    out = base.transpose(0, 1)[..., 11:48]
    module.dynamic_per_token_quant(out, torch.empty(6, 4, 1), x, None)
    assert torch.equal(out, native(ops.dynamic_per_token_quant_int8, x)[0])
    out.fill_(9)
    assert (base == 9).all(), "wrote outside of out"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, 128, 200])
def test_every_16_bit_value_in_groups(
    module: ModuleType, isa: str, dtype: torch.dtype, size: int
) -> None:
    """Below the largest of a group, by which many quotients are ties; and any together."""
    numbers = every_number(dtype)
    check(ops.per_token_group_quant_fp8, numbers.view(64, 1024), size)
    numbers = numbers[numbers.isfinite()]
    for power in (-9, -3, 0, 5, 11):
        for largest in (1.0, 1.75, 1.3125, 1.9921875):
            most = largest * 2.0**power
            below = numbers[(numbers.abs() <= most) & (numbers.abs() >= most / 2**22)]
            below = below[torch.randperm(len(below))[: len(below) // (size - 1) * (size - 1)]]
            groups = below.view(-1, size - 1)
            x = torch.nn.functional.pad(groups, (0, 1), value=most)
            for power_of_two in (False, True):
                check(ops.per_token_group_quant_fp8, x.reshape(-1, size), size, power_of_two)


def test_scale_ub(module: ModuleType, isa: str) -> None:
    x = random(5, 33, dtype=torch.float32) * torch.tensor([[0.01], [1], [5], [50], [500]])
    for bound in (0.0, 2.0, 1e9, -1.0, torch.inf, torch.nan):
        for shape in ((), (1,), (1, 1)):
            q, s = check(ops.dynamic_per_token_quant_fp8, x, torch.full(shape, bound))
            assert q.shape == x.shape
    q, s = ours(ops.dynamic_per_token_quant_fp8, x, torch.tensor(2.0))
    assert (s <= 2.0 / 448 * (1 + 1e-7)).all()
    assert (q[4].float().abs() == 448).any()


def test_powers_of_two_are_exact(module: ModuleType, isa: str) -> None:
    exact = 2.0 ** torch.arange(-17, 100, dtype=torch.float32)
    largest = torch.cat([(exact * 448), (exact * 448).nextafter(torch.tensor(torch.inf))])
    x = torch.zeros(len(largest), 8)
    x[:, 3] = -largest
    _, scale = check(ops.per_token_group_quant_fp8, x, 8, True)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    assert torch.equal(scale[: len(exact), 0], exact)
    assert torch.equal(scale[len(exact) :, 0], exact * 2)
    _, zero = ours(ops.per_token_group_quant_fp8, torch.zeros(2, 9), 4, True)
    assert (zero == 2**-17).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    x = random(9, 37, dtype=dtype)
    x[1, 36] = torch.nan
    x[2, 3] = torch.inf
    x[3, 0] = -torch.inf
    x[4] = 0.0
    x[5] = -0.0
    x[6] = torch.finfo(dtype).max
    x[7] = torch.finfo(dtype).tiny / 4
    x[8, ::2] *= 1e-4
    for op in (ops.dynamic_per_token_quant_fp8, ops.dynamic_per_token_quant_int8):
        q, s = check(op, x)
        assert s[1].isnan()
        assert (s[[0, 4, 5, 6, 7, 8]] > 0).all()
        assert (q[[4, 5]].float() == 0).all()
    for size in (5, 16, 64):
        for power_of_two in (False, True):
            check(ops.per_token_group_quant_fp8, x, size, power_of_two)
    check(ops.dynamic_per_tensor_quant_fp8, x)
    check(ops.dynamic_per_tensor_quant_fp8, x[3:])
    assert check(ops.dynamic_per_tensor_quant_fp8, x[4:6])[1] > 0
    for scale in (0.0, -1.0, 1e-45, torch.inf, torch.nan, 1e38):
        for op in (ops.static_quant_fp8, ops.static_quant_int8):
            check(op, x, torch.tensor(scale))


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("static_quant_fp8", ()),
        ("static_quant_int8", ()),
        ("dynamic_per_token_quant_fp8", ()),
        ("rms_norm_static_quant_fp8", (None, 1e-6)),
        ("silu_and_mul_static_quant_fp8", ()),
        ("linear_w8a16", (torch.arange(-24, 24, dtype=INT8).view(8, 6),)),
    ],
)
def test_a_scale_of_many_dimensions(
    module: ModuleType, name: str, others: tuple[object, ...]
) -> None:
    op, x, scale = getattr(ir.ops, name), random(4, 6, dtype=torch.float32), torch.tensor([0.25])
    wide = scale.view([1] * 9)
    assert op.dispatch(x, *others, wide).provider != "opweave_c"
    got, wanted = op(x, *others, wide), op(x, *others, scale)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.07, atol=0.1)
