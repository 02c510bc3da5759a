"""layer_norm computes its definition: every dtype, weight, bias, call path and instruction set."""

from __future__ import annotations

import itertools
import math
import random as stdlib_random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.norm import layer_norm as op
from opweave.kernels.opweave_c.norm import layer_norm as provided

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

SHAPES = [(1, 64), (7, 769), (3, 5, 51), (64,), (0, 32), (4, 0), (3, 1), (2, 3, 2, 17)]
KINDS = ("none", "same", "float32")
VECTORS = [(a, b) for a in KINDS for b in KINDS if a == b or "none" in (a, b)]


def oracle(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """In float64, row by row."""
    out = torch.empty(x.shape, dtype=x.dtype)
    for index in itertools.product(*map(range, x.shape[:-1])):
        values = x[index].tolist()
        mean = sum(values) / max(1, len(values))
        variance = sum((v - mean) ** 2 for v in values) / max(1, len(values))
        row = torch.tensor([(v - mean) / math.sqrt(variance + epsilon) for v in values]).double()
        if weight is not None:
            row = row * weight.double()
        if bias is not None:
            row = row + bias.double()
        out[index] = row.to(x.dtype)
    return out


def near(got: Tensor, wanted: Tensor, *, share: float = 0.99) -> None:
    assert_op_close(op, got, wanted, share=share)


def native(*arguments: Any) -> Tensor:
    result: Tensor = op.impls["native"].impl_fn(*arguments)
    return result


def accepts(*arguments: Any) -> bool:
    with ir.priority(layer_norm=["opweave_c"]):
        return op.dispatch(*arguments).provider == "opweave_c"


@pytest.mark.parametrize("vectors", VECTORS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(module: ModuleType, isa: str, dtype: torch.dtype, vectors: tuple[str, str]) -> None:
    for shape in SHAPES:
        x = 3 + random(*shape, dtype=dtype)
        weight = weight_for(vectors[0], shape[-1], dtype)
        bias = weight_for(vectors[1], shape[-1], dtype, seed=4)
        outs = [torch.full_like(x, 7) for _ in CALL_PATHS]
        for name, out in zip(CALL_PATHS, outs, strict=True):
            call_path(module, name, "layer_norm")(out, x, weight, bias, 1e-5)
        assert torch.equal(*outs)
        near(outs[0], oracle(x, weight, bias, 1e-5))
        assert accepts(x, weight, bias, 1e-5)
        near(outs[0], native(x, weight, bias, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    x = random(67, 5125, dtype=dtype) - 2
    weight, bias = (weight_for("same", 5125, dtype, seed=s) for s in (1, 2))
    near(provided(x, weight, bias, 1e-5), native(x, weight, bias, 1e-5))


def test_a_large_mean_costs_no_digits(module: ModuleType, isa: str) -> None:
    x = 4096 + random(4, 1000, dtype=torch.float32)
    wanted = torch.nn.functional.layer_norm(x.double(), (1000,), eps=0.0).float()
    torch.testing.assert_close(provided(x, None, None, 0.0), wanted, atol=2e-3, rtol=1e-5)


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    wide = random(3, 4, 60, dtype=dtype)
    return {
        "contiguous": wide,
        "slice": wide[..., :37],
        "transposed": wide.transpose(0, 1),
        "steps": wide[:, ::2, 3:40],
        "expanded": wide[:1].expand(3, 4, 60),
        "empty": wide[:0],
        "vector": wide[0, 0],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", layouts(torch.float32))
def test_strides_are_those_of_native(module: ModuleType, dtype: torch.dtype, layout: str) -> None:
    x = layouts(dtype)[layout]
    assert accepts(x, None, None, 1e-5)
    got, wanted = provided(x, None, None, 1e-5), native(x, None, None, 1e-5)
    near(got, wanted)
    assert got.stride() == wanted.stride()


@pytest.mark.parametrize("name", CALL_PATHS)
def test_out_may_be_x(module: ModuleType, name: str) -> None:
    x = random(5, 77, dtype=torch.float16)
    wanted = provided(x, None, None, 1e-5)
    call_path(module, name, "layer_norm")(x, x, None, None, 1e-5)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_batch(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    x = random(301, 2049, dtype=dtype)
    weight, bias = (weight_for("same", 2049, dtype, seed=s) for s in (1, 2))
    with using_threads(2):
        whole = provided(x, weight, bias, 1e-5)
    for row in (0, 150, 300):
        assert torch.equal(provided(x[row].clone(), weight, bias, 1e-5), whole[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_stay_in_their_row(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    x = random(4, 21, dtype=dtype)
    x[1, 20], x[2, 3] = float("nan"), float("inf")
    got = provided(x, None, None, 1e-5)
    assert got[1:3].isnan().all()
    near(got[[0, 3]], oracle(x[[0, 3]], None, None, 1e-5))


def test_refusals(module: ModuleType) -> None:
    x, half = torch.ones(2, 8), torch.ones(8, dtype=torch.float16)
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((torch.ones(1, 8), x, None, None), "out must have the shape of x, [2, 8]"),
        ((torch.ones(2, 8), x, torch.ones(7), None), "weight must be None or have shape [8]"),
        ((torch.ones(2, 8), x, None, torch.ones(1, 8)), "bias must be None or have shape [8]"),
        ((torch.ones(2, 8), x, half, None), "weight must be float32"),
        ((torch.ones(2, 8), x, None, half), "bias must be float32"),
        ((x[0], x[0].clone(), x[0], None), "out is written and must not share memory with weight"),
        ((x[:, :4], x[:, 1:5], None, None), "out is written and must not share memory with x"),
    ]
    for arguments, expected in refused:
        for name in CALL_PATHS:
            with pytest.raises(RuntimeError) as error:
                call_path(module, name, "layer_norm")(*arguments, 1e-5)
            assert str(error.value).startswith(f"layer_norm: {expected}")
    y = x.half()
    with pytest.raises(RuntimeError, match="bias must have the dtype of weight, float16"):
        module.layer_norm(torch.empty_like(y), y, half, torch.ones(8), 1e-5)


def test_selection(module: ModuleType) -> None:
    x, y, w = torch.ones(2, 8), torch.ones(2, 8).half(), torch.ones(8)
    assert accepts(x, w, w, 1e-5)
    assert accepts(y, w, None, 1e-5)
    assert accepts(y, w.half(), w.half(), 1e-5)
    assert not accepts(y, w.half(), w, 1e-5)
    assert not accepts(x, w.half(), None, 1e-5)
    assert not accepts(x, torch.ones(1).expand(8), None, 1e-5)
    assert not accepts(x.double(), None, None, 1e-5)
    assert not accepts(x.t(), None, None, 1e-5)


def test_opcheck(module: ModuleType) -> None:
    arguments = (torch.empty(3, 8), torch.randn(3, 8), torch.ones(8), None, 1e-5)
    torch.library.opcheck(torch.ops.opweave_c.layer_norm.default, arguments)


def fuzz(module: ModuleType, isas: tuple[str, ...], count: int, seed: int) -> None:
    draw = stdlib_random.Random(seed)
    for number in range(count):
        dtype = draw.choice(DTYPES)
        leading = [draw.randrange(5) for _ in range(draw.randrange(4))]
        order = draw.sample(range(len(leading)), len(leading))
        width, pad = draw.randrange(1, 150), draw.randrange(3)
        module._select_isa(draw.choice(isas))
        whole = random(*(leading[d] for d in order), width + pad, dtype=dtype, seed=seed + number)
        inverse = [order.index(d) for d in range(len(leading))]
        # Squares of more overflow, and torch's result then depends on the width.
        x = with_extremes(whole.permute(*inverse, len(leading)), draw, largest=1e18)[..., pad:]
        kinds = draw.choice(VECTORS)
        weight, bias = (weight_for(k, width, dtype, seed + i) for i, k in enumerate(kinds))
        epsilon = draw.choice([1e-6, 1e-5, 1.0])
        got, wanted = provided(x, weight, bias, epsilon), native(x, weight, bias, epsilon)
        near(got, wanted, share=0)
        assert got.stride() == wanted.stride() or not got.numel()


def test_fuzz(module: ModuleType, isas: tuple[str, ...]) -> None:
    fuzz(module, isas, 400, seed=1)


@pytest.mark.slow
def test_fuzz_long(module: ModuleType, isa: str) -> None:
    fuzz(module, (isa,), 10_000, seed=1_000_000)
