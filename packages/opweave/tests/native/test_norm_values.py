"""The norms compute their definition: every dtype, weight, path, layout and instruction set."""

from __future__ import annotations

import random as stdlib_random
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from opweave import ir

from . import oracle
from .oracle import (
    CALL_PATHS,
    DTYPES,
    FLUSHING,
    assert_near,
    assert_op_close,
    call_path,
    random,
    using_threads,
    weight_for,
    with_extremes,
)

Layout = Callable[[Tensor], Tensor]
SHAPES = [(1, 64), (7, 769), (3, 5, 517), (64,), (0, 32), (4, 0), (3, 1), (2, 3, 2, 17)]
WEIGHTS = ("none", "same", "float32")
NORMS = ("rms_norm", "add_rms_norm", "fused_add_rms_norm")


@pytest.mark.parametrize("weight_kind", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path_name", CALL_PATHS)
def test_rms_norm(
    module: ModuleType, isa: str, path_name: str, dtype: torch.dtype, weight_kind: str
) -> None:
    for shape in SHAPES:
        x = random(*shape, dtype=dtype)
        weight = weight_for(weight_kind, shape[-1], dtype)
        out = torch.full_like(x, 7)
        call_path(module, path_name, "rms_norm")(out, x, weight, 1e-6)
        assert_near(out, oracle.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("weight_kind", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path_name", CALL_PATHS)
def test_fused_add_rms_norm(
    module: ModuleType, isa: str, path_name: str, dtype: torch.dtype, weight_kind: str
) -> None:
    for shape in SHAPES:
        x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=2)
        weight = weight_for(weight_kind, shape[-1], dtype)
        wanted, total = oracle.fused_add_rms_norm(x, residual, weight, 1e-5)
        out, added = torch.full_like(x, 7), torch.full_like(x, 7)
        call_path(module, path_name, "add_rms_norm")(out, added, x, residual, weight, 1e-5)
        call_path(module, path_name, "fused_add_rms_norm")(x, residual, weight, 1e-5)
        assert torch.equal(residual, total)
        assert torch.equal(added, total)
        assert torch.equal(out, x)
        assert_near(x, wanted)


def test_outputs_and_inputs_are_apart(module: ModuleType) -> None:
    x, residual, out = (random(4, 32, dtype=torch.float32, seed=seed) for seed in range(3))
    for tensors in ((out, out, x, residual), (x, out, x, residual), (out, residual, x, residual)):
        with pytest.raises(RuntimeError, match="share"):
            module.add_rms_norm(*tensors, None, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_rows(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    x = random(3, 5, 5125, dtype=dtype)
    weight = weight_for("same", 5125, dtype)
    out = torch.empty_like(x)
    module.rms_norm(out, x, weight, 1e-6)
    assert_near(out, oracle.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("magnitude", [1e-10, 1e-14, 1e-20])
def test_small_squares_count(module: ModuleType, isa: str, magnitude: float) -> None:
    """Instructions that multiply pairs of bfloat16 flush what is below 1.2e-38 to zero."""
    x = (random(3, 4096, dtype=torch.float32) * magnitude).to(torch.bfloat16)
    out = torch.empty_like(x)
    module.rms_norm(out, x, None, 0.0)
    assert_near(out, oracle.rms_norm(x, None, 0.0))


def whole_rows(base: Tensor) -> Tensor:
    return base.flatten()[: 12 * 37].view(12, 37)


def whole_blocks(base: Tensor) -> Tensor:
    return base.flatten()[: 12 * 37].view(3, 4, 37)


def some_blocks(base: Tensor) -> Tensor:
    return base.flatten()[: 6 * 37].view(3, 2, 37)


def swapped_blocks(base: Tensor) -> Tensor:
    return base.flatten()[: 12 * 37].view(4, 3, 37)


def slice_2d(base: Tensor) -> Tensor:
    return base[:, 3:40]


def slice_3d(base: Tensor) -> Tensor:
    return base.view(3, 4, -1)[..., :37]


def rows_that_do_not_collapse(base: Tensor) -> Tensor:
    return base.view(3, 4, -1)[:, ::2, 1:38]


def permuted_leading_dims(base: Tensor) -> Tensor:
    return base.view(3, 4, -1).transpose(0, 1)[..., :37]


BASE = torch.empty(12, 61)
LAYOUTS: list[Layout] = [
    whole_rows,
    whole_blocks,
    some_blocks,
    swapped_blocks,
    slice_2d,
    slice_3d,
    rows_that_do_not_collapse,
    permuted_leading_dims,
]


@pytest.mark.parametrize(
    ("layout", "out_layout"),
    [(a, b) for a in LAYOUTS for b in LAYOUTS if a(BASE).shape == b(BASE).shape],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(
    module: ModuleType, dtype: torch.dtype, layout: Layout, out_layout: Layout
) -> None:
    x = layout(random(12, 61, dtype=dtype))
    base = torch.full((12, 61), 9.0, dtype=dtype)
    out = out_layout(base)
    untouched = base.clone()
    module.rms_norm(out, x, None, 1e-6)
    assert_near(out, oracle.rms_norm(x, None, 1e-6))
    out_layout(untouched).copy_(out)
    assert torch.equal(base, untouched), "wrote outside of out"


def test_expanded_input(module: ModuleType) -> None:
    x = random(1, 33, dtype=torch.float32).expand(5, 33)
    out = torch.empty(5, 33)
    module.rms_norm(out, x, None, 1e-6)
    assert_near(out, oracle.rms_norm(x, None, 1e-6))


@pytest.mark.parametrize("path_name", CALL_PATHS)
def test_out_may_be_x(module: ModuleType, isa: str, path_name: str) -> None:
    x = random(5, 77, dtype=torch.bfloat16)
    wanted = oracle.rms_norm(x, None, 1e-6)
    call_path(module, path_name, "rms_norm")(x, x, None, 1e-6)
    assert_near(x, wanted)


def test_slices_of_one_projection(module: ModuleType) -> None:
    wide = random(6, 96, dtype=torch.float32)
    x, residual = wide[:, :48], wide[:, 48:]
    wanted, total = oracle.fused_add_rms_norm(x, residual, None, 1e-6)
    module.fused_add_rms_norm(x, residual, None, 1e-6)
    assert torch.equal(residual, total)
    assert_near(x, wanted)


@pytest.mark.parametrize("width", [2049, 4096, 4097])  # the weight of many rows may be widened
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_batch(
    module: ModuleType, isa: str, dtype: torch.dtype, width: int
) -> None:
    x = random(301, width, dtype=dtype)
    weight = weight_for("same", width, dtype)
    with using_threads(2):
        whole = torch.empty_like(x)
        module.rms_norm(whole, x, weight, 1e-6)
    for row in (0, 1, 150, 300):
        alone = torch.empty(width, dtype=dtype)
        module.rms_norm(alone, x[row].clone(), weight, 1e-6)
        assert torch.equal(alone, whole[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_stay_in_their_row(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    x = random(4, 21, dtype=dtype)
    x[1, 20] = float("nan")
    x[2, 3] = float("inf")
    out = torch.empty_like(x)
    weight = weight_for("same", 21, dtype)
    module.rms_norm(out, x, weight, 1e-6)
    assert out[1].isnan().all()
    assert out[2, 3].isnan()
    assert (out[2, :3] == 0).all()
    assert_near(out[[0, 3]], oracle.rms_norm(x[[0, 3]], weight, 1e-6))


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_whose_squares_vanish_is_infinite_without_epsilon(
    module: ModuleType, isa: str, dtype: torch.dtype, kind: str
) -> None:
    x = torch.full((2, 37), 1e-25, dtype=dtype)
    x[0, ::2] *= -1
    x[1, 5] = 1.0
    weight = weight_for(kind, 37, dtype)
    out = torch.empty_like(x)
    module.rms_norm(out, x, weight, 0.0)
    wanted = ir.ops.rms_norm.native(x, weight, 0.0)
    assert wanted[0].isinf().all()
    assert torch.equal(out[0], wanted[0])
    assert_op_close(ir.ops.rms_norm, out[1], wanted[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_rounds_as_in_torch(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = codes.view(dtype).view(256, 256).clone()
    residual = x.flip(0).roll(97, 1).contiguous() * 0.37
    total = (x.float() + residual.float()).to(dtype)
    module.fused_add_rms_norm(x, residual, None, 1e-6)
    normal = ~(total.float().abs() < torch.finfo(dtype).tiny)  # AVX512-BF16 flushes denormals
    if not (isa in FLUSHING and dtype == torch.bfloat16):
        normal[:] = True
    same = (residual == total) | (residual.isnan() & total.isnan())
    assert same[normal].all()


def permuted(shape: list[int], width: int, draw: stdlib_random.Random) -> Callable[[int], Tensor]:
    """Return what makes a tensor of a shape from a seed, in one layout of dimensions and rows."""
    order = draw.sample(range(len(shape)), len(shape))
    inverse = [order.index(d) for d in range(len(shape))]
    pad, dtype = draw.randrange(4), draw.choice(DTYPES)

    def tensor(seed: int) -> Tensor:
        size = draw.choice([0.01, 1.0, 100.0])
        whole = random(*(shape[d] for d in order), width + pad, dtype=dtype, seed=seed) * size
        whole = with_extremes(whole, draw)
        return whole.permute(*inverse, len(shape))[..., pad:]

    return tensor


def fuzz(module: ModuleType, isas: tuple[str, ...], count: int, seed: int) -> None:
    """Every norm in place and out of place, against the native implementation."""
    draw = stdlib_random.Random(seed)
    for number in range(seed, seed + 2 * count, 2):
        shape = [draw.randrange(5) for _ in range(draw.randrange(5))]
        width = draw.choice([1, 2, 15, 16, 17, draw.randrange(1, 200)])
        tensor = permuted(shape, width, draw)
        x, residual = tensor(number), tensor(number + 1)
        weight = weight_for(draw.choice(WEIGHTS), width, x.dtype, number)
        epsilon = draw.choice([0.0, 1e-6, 1.0])
        module._select_isa(draw.choice(isas))
        paths = [call_path(module, draw.choice(CALL_PATHS), name) for name in NORMS]
        normed, out, total = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
        paths[0](normed, x, weight, epsilon)
        assert_op_close(ir.ops.rms_norm, normed, ir.ops.rms_norm.native(x, weight, epsilon))
        wanted, added = ir.ops.fused_add_rms_norm.native(x, residual, weight, epsilon)
        paths[1](out, total, x, residual, weight, epsilon)
        paths[2](x, residual, weight, epsilon)
        for found, sums in ((out, total), (x, residual)):
            assert_op_close(ir.ops.fused_add_rms_norm, sums, added, share=1)
            assert_op_close(ir.ops.fused_add_rms_norm, found, wanted)


def test_fuzz(module: ModuleType, isas: tuple[str, ...]) -> None:
    fuzz(module, isas, 500, seed=1)


@pytest.mark.slow
def test_fuzz_long(module: ModuleType, isa: str) -> None:
    fuzz(module, (isa,), 10_000, seed=1_000_000)
