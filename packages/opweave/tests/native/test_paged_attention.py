"""Paged attention is attention: over any layout, batch and instruction set, reading no more."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.paged_attention import paged_attention

from . import oracle
from .oracle import CALL_PATHS, DTYPES, FP8, call_path, same_bits, share_of_neighbors, using_threads
from .paged_cases import (
    BLIND,
    DECODE,
    MIXED,
    NAN,
    PREFILL,
    SHARED,
    WHOLE_HEADS,
    Case,
    case,
    drawn_cases,
    in_one_tensor,
    reference,
)

slow = pytest.mark.slow


def check(run: Callable[..., None], c: Case) -> Tensor:
    out = c.out()
    run(out, *c.arguments())
    tolerance = paged_attention.get_tolerance(out.dtype)
    wanted = reference(c)
    torch.testing.assert_close(
        out.double(), wanted, atol=tolerance.atol, rtol=tolerance.rtol, equal_nan=False
    )
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_is_the_same(dtype: torch.dtype) -> None:
    for sequences in (DECODE, PREFILL, MIXED, BLIND):
        for options in ({}, {"window": 9}, {"soft_cap": 3.0}, {"causal": False}):
            c = case(sequences, dtype=dtype, extra=1, **options)
            found = paged_attention.native(*c.arguments())
            tolerance = paged_attention.get_tolerance(dtype)
            torch.testing.assert_close(
                found.double(), reference(c), atol=tolerance.atol, rtol=tolerance.rtol
            )


@pytest.mark.parametrize("layout", WHOLE_HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_caches_in_one_tensor(
    module: ModuleType, isa: str, dtype: torch.dtype, layout: str
) -> None:
    for sequences in (DECODE, MIXED, PREFILL):
        c = case(sequences, heads=(6, 3), dtype=dtype, block_size=32)
        keys, values = in_one_tensor(c.key_cache, c.value_cache, layout)
        shared = replace(c, key_cache=keys, value_cache=values)
        wanted = check(module.paged_attention, c)
        assert torch.equal(check(module.paged_attention, shared), wanted)


@pytest.mark.parametrize("layout", SHARED)
def test_any_layout_of_caches_is_taken_by_some_kernel(module: ModuleType, layout: str) -> None:
    c = case(MIXED, heads=(6, 3))
    keys, values = in_one_tensor(c.key_cache, c.value_cache, layout)
    shared = replace(c, key_cache=keys, value_cache=values)
    with ir.priority(paged_attention=["opweave_c"]):
        found = paged_attention(*shared.arguments())
        explanation = ir.explain(paged_attention, *shared.arguments())
    tolerance = paged_attention.get_tolerance(found.dtype)
    torch.testing.assert_close(
        found.double(), reference(c), atol=tolerance.atol, rtol=tolerance.rtol
    )
    assert (explanation.chosen == "opweave_c") is (layout in WHOLE_HEADS)
    if layout not in WHOLE_HEADS:
        assert "positions of a head are not contiguous" in str(explanation)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_does_not_depend_on_the_batch(
    module: ModuleType, isa: str, dtype: torch.dtype, window: int | None
) -> None:
    """Not on other sequences, on threads, nor on how many queries of a sequence come at once."""
    c = case([(40, 150), (1, 33), (9, 9)], heads=(6, 2), dtype=dtype, window=window)
    whole = check(module.paged_attention, c)
    with using_threads(2):
        assert torch.equal(check(module.paged_attention, c), whole)
    for i, (start, end, length) in enumerate([(0, 40, 150), (40, 41, 33), (41, 50, 9)]):
        for token in (start, (start + end) // 2, end - 1):
            alone = replace(
                c,
                query=c.query[token : token + 1],
                tables=c.tables[i : i + 1],
                lengths=torch.tensor([length - (end - 1 - token)], dtype=torch.int32),
                starts=torch.tensor([0, 1], dtype=torch.int32),
            )
            out = alone.out()
            module.paged_attention(out, *alone.arguments())
            assert torch.equal(out[0], whole[token])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_share_the_heads_of_a_sequence(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    c = case([(1, 200)], heads=(16, 8), block_size=64, dtype=dtype)
    alone = check(module.paged_attention, c)
    for threads in (2, 3, 5, 16):
        with using_threads(threads):
            assert torch.equal(check(module.paged_attention, c), alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_unseen_key_reaches_no_query(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    for heads in ((4, 4), (4, 2), (4, 1)):
        c = case([(12, 40)], heads=heads, window=20, dtype=dtype)
        clean = check(module.paged_attention, c)
        block, offset = int(c.tables[0, 2]), 3  # position 35, the eighth query's
        c.key_cache[block, :, offset] = NAN
        c.value_cache[block, :, offset] = NAN
        c.value_cache[int(c.tables[0, 0]), :, :9] = NAN  # before every window
        out = c.out()
        module.paged_attention(out, *c.arguments())
        assert torch.equal(out[:7], clean[:7])
        assert out[7:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_values_reach_those_that_see_them(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    c = case([(12, 40)], heads=(4, 2), window=20, dtype=dtype)
    clean = check(module.paged_attention, c)
    block = int(c.tables[0, 2])
    for column, bad in ((3, math.inf), (40, -math.inf)):
        c.value_cache[block, 1, 3, column] = bad  # position 35, the eighth query's
        out = c.out()
        module.paged_attention(out, *c.arguments())
        assert (out[7:, 2:, column] == bad).all()
        others = [i for i in range(64) if i not in (3, 40)]
        torch.testing.assert_close(out[..., others], clean[..., others], atol=1e-2, rtol=1.6e-2)
        assert torch.equal(out[:7], clean[:7])
        assert torch.equal(out[:, :2], clean[:, :2])
    c.value_cache[block, 1, 3, 40] = math.inf
    c.value_cache[block, 1, 4, 40] = -math.inf  # infinities of both signs are NaN
    module.paged_attention(out, *c.arguments())
    assert out[8:, 2:, 40].isnan().all()


def test_extreme_scores(module: ModuleType, isa: str) -> None:
    c = case([(1, 60), (30, 60)], scale=1e4)
    check(module.paged_attention, c)
    c.query *= 1e15
    check(module.paged_attention, c)  # weights are one or zero
    c.query[0] = float("inf")
    out = c.out()
    module.paged_attention(out, *c.arguments())
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()
    zero = case([(1, 60)], scale=0.0)
    check(module.paged_attention, zero)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_scores_of_minus_infinity(
    module: ModuleType, isa: str, dtype: torch.dtype, window: int | None
) -> None:
    c = case([(1, 80), (3, 150)], dtype=dtype, window=window)
    c.query[..., 0] = 1
    for tables in c.tables:
        c.key_cache[tables[:4].tolist(), :, :, 0] = -math.inf  # a whole tile of keys
    check(module.paged_attention, c)  # later keys take all of the weight
    for tables in c.tables:
        used = tables[(tables >= 0) & (tables < len(c.key_cache))]
        c.key_cache[used.tolist(), :, :, 0] = -math.inf
    out = c.out()
    module.paged_attention(out, *c.arguments())
    assert out.isnan().all()  # as a softmax of them is


def test_a_window_of_any_size(module: ModuleType, isa: str) -> None:
    for dtype in DTYPES:
        endless = check(module.paged_attention, case([(5, 2), (1, 70)], dtype=dtype))
        for window in (2**31, 2**63 - 1):
            c = case([(5, 2), (1, 70)], dtype=dtype, window=window)
            assert torch.equal(check(module.paged_attention, c), endless)


@pytest.mark.parametrize("soft_cap", [1e-60, 1e-39, 1e-30, 1e30])
def test_soft_caps_of_any_size(module: ModuleType, isa: str, soft_cap: float) -> None:
    for dtype in DTYPES:
        c = case([(1, 70), (5, 20)], dtype=dtype, soft_cap=soft_cap)
        check(module.paged_attention, c)
        c.query.zero_()
        check(module.paged_attention, c)


OUT_OF_MEMORY = """
import resource, torch
from opweave import native
module, heads, size = native.module(), 2**20, 16
torch.set_num_threads(2)
query, out = (torch.zeros(1, heads, size) for _ in range(2))
cache = torch.zeros(1, 1, 16, size)
ints = [torch.tensor(values, dtype=torch.int32) for values in ([[0]], [16], [0, 1])]
arguments = out, query, cache, cache.clone(), *ints, 1.0, True, None, None
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (80 << 20), resource.RLIM_INFINITY))
try:
    module.paged_attention(*arguments)
except RuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
module.paged_attention(*arguments)
print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_without_memory_to_compute_in(module: ModuleType) -> None:
    command = [sys.executable, "-c", OUT_OF_MEMORY]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found[0].startswith("paged_attention: there is no memory for ")
    assert found[1:] == ["done"]


@pytest.mark.parametrize("count", [250, pytest.param(10_000, marks=slow)])
def test_any_case(module: ModuleType, isas: tuple[str, ...], count: int) -> None:
    for c, pick in drawn_cases(count):
        module._select_isa(pick.choice(isas))
        check(call_path(module, pick.choice(CALL_PATHS), "paged_attention"), c)


# Attention that is quantized as it is stored: bit by bit what quantizing it afterwards gives.

SCALE = torch.tensor([0.02])


def arguments(c: Case, out_scale: Tensor = SCALE) -> tuple[Any, ...]:
    """The arguments of the op."""
    return (*c.arguments()[:6], out_scale, *c.arguments()[6:])


def empty(c: Case) -> Tensor:
    tokens, heads, _ = c.query.shape
    return torch.full((tokens, heads * c.value_cache.shape[3]), 7.0).to(FP8)


def check_quantized(
    module: ModuleType, c: Case, out_scale: Tensor = SCALE, run: Callable[..., None] | None = None
) -> Tensor:
    """Against the kernels of the parts, one after the other."""
    attended, wanted, out = c.out(), empty(c), empty(c)
    module.paged_attention(attended, *c.arguments())
    module.static_quant(wanted, attended.flatten(1), out_scale)
    (run or module.attention_quant)(out, *arguments(c, out_scale))
    assert same_bits(out, wanted)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_definition(module: ModuleType, isa: str, dtype: torch.dtype) -> None:
    """Against attention in float64, and codes found in a table."""
    for sequences in (DECODE, PREFILL, MIXED):
        c = case(sequences, dtype=dtype)
        exact = reference(c).to(dtype).flatten(1)
        inverse = float(1 / SCALE)
        codes = oracle.codes_for(FP8, oracle.product(exact.double(), inverse))
        wanted = torch.from_numpy(codes).to(torch.uint8).view(FP8)
        out = empty(c)
        module.attention_quant(out, *arguments(c))
        near_zero = (wanted.float().abs() < 1) & ((out.float() - wanted.float()).abs() < 0.1)
        differing = torch.where(near_zero, wanted.float(), out.float()).to(FP8)
        # Weights that meet pairs are rounded to bfloat16: a few more codes are the next one.
        by_pairs = isa in ("avx512bf16", "zen4", "amx") and dtype == torch.bfloat16
        most = 0.03 if by_pairs else 0.02
        assert share_of_neighbors(differing, wanted) <= most


@pytest.mark.parametrize("value", [0.0, -0.5, NAN, float("inf"), 1e-45, 3e38])
def test_any_scale(module: ModuleType, isa: str, value: float) -> None:
    """Queries after the last sequence, and such that see nothing, are zeros, which are scaled."""
    for dtype in DTYPES:
        check_quantized(
            module, case([(3, 2), (1, 5)], dtype=dtype, extra=2), torch.tensor([[value]])
        )


@pytest.mark.parametrize("count", [250, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_quantized_case(module: ModuleType, isas: tuple[str, ...], count: int) -> None:
    for c, pick in drawn_cases(count, seed=1):
        module._select_isa(pick.choice(isas))
        out_scale = torch.full((1,) * pick.randint(0, 2), 10.0 ** -pick.randint(0, 5))
        check_quantized(
            module, c, out_scale, call_path(module, pick.choice(CALL_PATHS), "attention_quant")
        )
