"""rms_norm_gated computes its definition: every dtype, order, gate, path and instruction set."""

from __future__ import annotations

import math
import random as stdlib_random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.norm import rms_norm_gated as op
from opweave.kernels.opweave_c.norm import rms_norm_gated as provided

from .oracle import (
    CALL_PATHS,
    DTYPES,
    assert_op_close,
    call_path,
    random,
    using_threads,
    weight_for,
    with_extremes,
)

SHAPES = [((1, 64), 16), ((7, 759), 253), ((3, 5, 51), 17), ((64,), 64), ((0, 32), 8), ((3, 1), 1)]
ORDERS = [(False, "silu"), (True, "swish"), (False, "sigmoid"), (True, "sigmoid")]
KINDS = ("none", "same", "float32")


def oracle(
    x: Tensor,
    weight: Tensor | None,
    z: Tensor | None,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "silu",
) -> Tensor:
    """In float64, group by group."""
    width = x.shape[-1]
    size = group_size or width
    rows = x.double().reshape(-1, width)
    if z is not None:
        gate = z.double().reshape(-1, width)
        gate = 1 / (1 + torch.exp(-gate)) * (1 if activation == "sigmoid" else gate)
    out = torch.empty_like(rows)
    for r, first in ((r, g) for r in range(len(rows)) for g in range(0, width, size)):
        part = slice(first, first + size)
        v = rows[r, part]
        if z is not None and not norm_before_gate:
            v = v * gate[r, part]
        v = v / math.sqrt(sum(e * e for e in v.tolist()) / size + epsilon)
        if weight is not None:
            v = v * weight.double()[part]
        out[r, part] = v * gate[r, part] if z is not None and norm_before_gate else v
    return out.view(x.shape).to(x.dtype)


def near(got: Tensor, wanted: Tensor, *, share: float = 0.99) -> None:
    assert_op_close(op, got, wanted, share=share)


def native(*arguments: Any) -> Tensor:
    result: Tensor = op.impls["native"].impl_fn(*arguments)
    return result


def accepts(*arguments: Any) -> bool:
    with ir.priority(rms_norm_gated=["opweave_c"]):
        return op.dispatch(*arguments).provider == "opweave_c"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [*ORDERS, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(
    module: ModuleType,
    isa: str,
    dtype: torch.dtype,
    order: tuple[bool, str] | None,
    kind: str,
) -> None:
    for shape, group_size in SHAPES:
        x = random(*shape, dtype=dtype)
        z = None if order is None else 2 * random(*shape, dtype=dtype, seed=3)
        before, activation = order or (False, "silu")
        weight = weight_for(kind, shape[-1], dtype)
        for size in (group_size, None):
            whole = shape[-1] if size is None else size
            outs = [torch.full_like(x, 7) for _ in CALL_PATHS]
            for name, out in zip(CALL_PATHS, outs, strict=True):
                run = call_path(module, name, "rms_norm_gated")
                run(out, x, weight, z, 1e-5, whole, before, activation == "sigmoid")
            assert torch.equal(*outs)
            arguments = (x, weight, z, 1e-5, size, before, activation)
            near(outs[0], oracle(*arguments))
            near(outs[0], native(*arguments))
            assert accepts(*arguments)
            assert torch.equal(provided(*arguments), outs[0])


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("width", [4096, 4097, 9001])  # 4096 fit the buffer of gated values
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_rows(
    module: ModuleType, isa: str, dtype: torch.dtype, width: int, order: tuple[bool, str]
) -> None:
    x, z = random(2, 5, width, dtype=dtype)
    weight = weight_for("same", width, dtype)
    arguments = (x, weight, z, 1e-6, None, *order)
    near(provided(*arguments), native(*arguments))


def layouts(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    both = random(12, 80, dtype=dtype)
    return {
        "contiguous": (both[:, :40].clone(), both[:, 40:].clone()),
        "slices of one projection": (both[:, :40], both[:, 40:]),
        "one slice": (both[:, :40].clone(), both[:, 40:]),
        "other slice": (both[:, :40], both[:, 40:].clone()),
        "expanded gate": (both[:, :40], both[:1, 40:].expand(12, 40)),
        "three dimensions": (both.view(3, 4, 80), both.flip(0).view(3, 4, 80)),
        "vectors": (both[0], both[1]),
        "empty": (both[:0], both[:0]),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", layouts(torch.float32))
def test_strides_are_those_of_native(module: ModuleType, dtype: torch.dtype, layout: str) -> None:
    x, z = layouts(dtype)[layout]
    for order in ORDERS:
        for size in (None, 10):
            arguments = (x, None, z, 1e-5, size, *order)
            assert accepts(*arguments)
            got, wanted = provided(*arguments), native(*arguments)
            near(got, wanted)
            assert got.stride() == wanted.stride()


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", CALL_PATHS)
def test_out_may_be_x_or_the_gate(module: ModuleType, name: str, order: tuple[bool, str]) -> None:
    run = call_path(module, name, "rms_norm_gated")
    for width in (77, 5000):
        x, z = random(2, 5, width, dtype=torch.bfloat16)
        wanted = provided(x, None, z, 1e-5, None, *order)
        for out in (0, 1):
            pair = [x.clone(), z.clone()]
            run(pair[out], pair[0], None, pair[1], 1e-5, width, order[0], order[1] == "sigmoid")
            assert torch.equal(pair[out], wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_batch(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    x, z = random(2, 301, 2050, dtype=dtype)
    weight = weight_for("same", 2050, dtype)
    for order in ORDERS:
        with using_threads(2):
            whole = provided(x, weight, z, 1e-5, 205, *order)
        for row in (0, 150, 300):
            alone = provided(x[row].clone(), weight, z[row].clone(), 1e-5, 205, *order)
            assert torch.equal(alone, whole[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_gates(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    numbers = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-7, -60.0, 60.0, -1e4, 1e4]
    z = torch.tensor(numbers).to(dtype).unsqueeze(-1).expand(-1, 8).contiguous()
    x = random(10, 8, dtype=dtype)
    for order in ORDERS:
        got, wanted = (f(x, None, z, 1e-5, None, *order) for f in (provided, native))
        near(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_stay_in_their_group(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    x, z = random(2, 4, 24, dtype=dtype)
    x[1, 20], x[2, 3] = float("nan"), float("inf")
    for order in ORDERS:
        got, wanted = (f(x, None, z, 1e-5, 8, *order) for f in (provided, native))
        assert got[1, 16:].isnan().all()
        assert not got[1, :16].isnan().any()
        near(got, wanted)


def test_refusals(module: ModuleType) -> None:
    x, z, out = torch.ones(2, 8), torch.ones(2, 8), torch.ones(2, 8)
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((out, x, None, z, 1e-5, 3), "group_size must divide 8, the last dimension of x, found 3"),
        ((out, x, None, z, 1e-5, 0), "group_size must divide 8"),
        ((out, x, None, z, 1e-5, -8), "group_size must divide 8"),
        ((out, x, torch.ones(7), z, 1e-5, 8), "weight must be None or have shape [8]"),
        ((out, x, None, z[:1], 1e-5, 8), "gate must have the shape of x, [2, 8]"),
        ((out, x, None, z.half(), 1e-5, 8), "gate must have the dtype of x, float32"),
        ((out, x, out[0], z, 1e-5, 8), "out is written and must not share memory with weight"),
        (
            (out[:1], x[:1], None, out.view(-1)[4:12].view(1, 8), 1e-5, 8),
            "out is written and must not share memory with gate",
        ),
    ]
    for arguments, expected in refused:
        for name in CALL_PATHS:
            with pytest.raises(RuntimeError) as error:
                call_path(module, name, "rms_norm_gated")(*arguments, False, False)
            assert str(error.value).startswith(f"rms_norm_gated: {expected}")


def test_what_native_refuses(module: ModuleType) -> None:
    x = torch.ones(2, 8)
    with ir.priority(rms_norm_gated=["opweave_c"]):
        with pytest.raises(ValueError, match="group_size=3 does not divide"):
            op(x, None, x, 1e-5, 3)
        with pytest.raises(ValueError, match="one of silu, swish, sigmoid; found 'relu'"):
            op(x, None, x, 1e-5, None, False, "relu")
        with pytest.raises(ValueError, match="z must have the shape of x"):
            op(x, None, torch.ones(8), 1e-5)


def test_selection(module: ModuleType) -> None:
    x, w = torch.ones(2, 8), torch.ones(8)
    assert accepts(x, w, x, 1e-5)
    assert accepts(x.half(), w, None, 1e-5)
    assert not accepts(x, w, x.half(), 1e-5)
    assert not accepts(x, w.half(), x, 1e-5)
    assert not accepts(x.double(), None, x.double(), 1e-5)
    wide = torch.ones(2, 3, 9)
    assert not accepts(wide[..., :8], None, wide[..., 1:], 1e-5)


def test_opcheck(module: ModuleType) -> None:
    arguments = (torch.empty(3, 8), torch.randn(3, 8), torch.ones(8), torch.randn(3, 8))
    run = torch.ops.opweave_c.rms_norm_gated.default
    torch.library.opcheck(run, (*arguments, 1e-5, 4, True, False))


def fuzz(module: ModuleType, isas: tuple[str, ...], count: int, seed: int) -> None:
    draw = stdlib_random.Random(seed)
    for number in range(count):
        dtype = draw.choice(DTYPES)
        size, groups = draw.randrange(1, 60), draw.randrange(1, 5)
        width, rows = size * groups, draw.randrange(5)
        module._select_isa(draw.choice(isas))
        x, z = (
            with_extremes(random(rows, width + pad, dtype=dtype, seed=first), draw)[:, pad:]
            for first in (seed + 2 * number, seed + 2 * number + 1)
            for pad in [draw.randrange(3)]
        )
        weight = weight_for(draw.choice(KINDS), width, dtype, seed)
        gate = draw.choice([z, z, z, None])
        group_size = draw.choice([size, width, None])
        epsilon = draw.choice([1e-6, 1e-5, 1.0])
        arguments = (x, weight, gate, epsilon, group_size, *draw.choice(ORDERS))
        assert accepts(*arguments)
        got, wanted = provided(*arguments), native(*arguments)
        near(got, wanted, share=0)
        pairs = zip(got.shape, got.stride(), wanted.stride(), strict=True)
        assert all(size <= 1 or a == b for size, a, b in pairs) or not rows


def test_fuzz(module: ModuleType, isas: tuple[str, ...]) -> None:
    fuzz(module, isas, 400, seed=1)


@pytest.mark.slow
def test_fuzz_long(module: ModuleType, isa: str) -> None:
    fuzz(module, (isa,), 10_000, seed=1_000_000)
