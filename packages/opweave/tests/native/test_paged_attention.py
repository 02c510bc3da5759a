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
from opweave.kernels.opweave_c import paged_attention as provider

from .oracle import CALL_PATHS, DTYPES, call_path, using_threads
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
    in_one_tensor,
    reference,
)


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
@pytest.mark.parametrize("name", CALL_PATHS)
@pytest.mark.parametrize("sequences", [DECODE, PREFILL, MIXED, BLIND, []])
def test_values(
    module: ModuleType,
    isa: str,
    name: str,
    dtype: torch.dtype,
    sequences: list[tuple[int, int]],
) -> None:
    run = call_path(module, name, "paged_attention")
    check(run, case(sequences, dtype=dtype))
    check(run, case(sequences, dtype=dtype, extra=2, causal=False, block_size=64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 7},
        {"window": 64},
        {"soft_cap": 2.0},
        {"window": 33, "soft_cap": 5.0},
    ],
    ids=str,
)
def test_window_and_soft_cap(
    module: ModuleType, isa: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    for block_size in (16, 80):
        sequences = [(1, 100), (40, 90), (3, 3)]
        c = case(sequences, dtype=dtype, block_size=block_size, **options)
        check(module.paged_attention, c)


@pytest.mark.parametrize(
    "heads", [(1, 1), (2, 2), (3, 1), (6, 2), (7, 1), (8, 1), (101, 1), (32, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads(module: ModuleType, isa: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    check(module.paged_attention, case([(1, 37), (6, 20)], heads=heads, dtype=dtype))


@pytest.mark.parametrize(
    "sizes", [(128, 128), (80, 80), (72, 40), (1, 1), (7, 300), (256, 256), (65, 17), (192, 128)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(module: ModuleType, isa: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    check(module.paged_attention, case([(1, 37), (6, 20)], sizes=sizes, dtype=dtype, scale=0.1))


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 80, 256])
def test_block_sizes(module: ModuleType, isa: str, block_size: int) -> None:
    c = case([(1, 300), (50, 150), (1, block_size)], block_size=block_size, dtype=torch.bfloat16)
    check(module.paged_attention, c)


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


def test_strides(module: ModuleType) -> None:
    c = case(MIXED, dtype=torch.bfloat16)
    wanted = check(module.paged_attention, c)
    tokens, heads, size = c.query.shape
    wide = torch.full((tokens, heads + 3, size + 5), NAN, dtype=torch.bfloat16)
    wide[:, 1 : 1 + heads, 2 : 2 + size] = c.query
    both = torch.stack((c.key_cache, c.value_cache), 1)
    tables = torch.cat((c.tables, c.tables), 1)[:, : c.tables.shape[1]]
    strided = replace(
        c,
        query=wide[:, 1 : 1 + heads, 2 : 2 + size],
        key_cache=both[:, 0],
        value_cache=both[:, 1],
        tables=tables,
    )
    assert torch.equal(check(module.paged_attention, strided), wanted)


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


def test_threads_share_long_batches(module: ModuleType) -> None:
    c = case([(1, 400)] * 7 + [(150, 300)], heads=(8, 2), block_size=64, dtype=torch.bfloat16)
    alone = check(module.paged_attention, c)
    with using_threads(2):
        for _ in range(5):
            out = c.out()
            module.paged_attention(out, *c.arguments())
            assert torch.equal(out, alone)


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


def changed(**changes: Any) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        c = case([(1, 20), (3, 3)])
        out = changes.get("out", c.out())
        values = {key: value for key, value in changes.items() if key != "out"}
        made = {key: value(c) if callable(value) else value for key, value in values.items()}
        return (out(c) if callable(out) else out), *replace(c, **made).arguments()

    return make


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def without(cache: Tensor, value: int) -> Tensor:
    copy = cache.clone()
    copy[0, 1] = value
    return copy


REFUSED: list[tuple[Callable[[], tuple[Any, ...]], str]] = [
    (changed(query=lambda c: c.query.double()), "query must be float32 or bfloat16 or float16"),
    (changed(query=lambda c: c.query[0]), "query must have shape [tokens, heads, head_size]"),
    (changed(query=lambda c: c.query[..., ::2]), "query must be contiguous in its last dimension"),
    (changed(query=lambda c: c.query[:, :3]), "query must have shape [tokens, a multiple of 2 h"),
    (changed(query=lambda c: c.query[..., :32]),
     "key_cache must have shape [blocks, kv_heads, block_size, 32]"),
    (changed(key_cache=lambda c: c.key_cache.half()), "key_cache must have the dtype of query"),
    (changed(key_cache=lambda c: c.key_cache[0]), "key_cache must have shape [blocks, kv_heads"),
    (changed(key_cache=lambda c: c.key_cache.transpose(1, 2).contiguous().transpose(1, 2)),
     "key_cache must be contiguous"),
    (changed(value_cache=lambda c: c.value_cache[:-1]), "value_cache must have shape [5, 2, 16, "),
    (changed(key_cache=torch.zeros(5, 2, 8, 64), value_cache=torch.zeros(5, 2, 8, 64)),
     "key_cache must have shape [blocks, kv_heads, a multiple of 16, head_size]"),
    (changed(out=torch.zeros(4, 4, 63)), "out must have shape [4, 4, 64]"),
    (changed(out=torch.zeros(4, 4, 128)[..., ::2]), "out must be contiguous"),
    (changed(out=lambda c: c.query), ""),
    (changed(tables=lambda c: c.tables.long()), "block_tables must be int32"),
    (changed(tables=lambda c: c.tables[0]), "block_tables must have shape [sequences, blocks]"),
    (changed(lengths=ints(20)), "seq_lens must have shape [2]"),
    (changed(starts=ints(0, 4)), "cu_seqlens_q must have shape [3]"),
    (changed(starts=ints(0, 1, 5)), "cu_seqlens_q must go from 0 to at most 4, the number of q"),
    (changed(starts=ints(1, 1, 4)), "cu_seqlens_q must go from 0"),
    (changed(starts=ints(0, 4, 2)), "sequence 1: its queries go from 4 to 2 in cu_seqlens_q"),
    (changed(lengths=ints(49, 3)),
     "sequence 0: its length is 49, but its table has 3 blocks of 16 positions"),
    (changed(lengths=ints(20, -1)), "sequence 1: its length is -1"),
    (changed(tables=lambda c: without(c.tables, 5)),
     "sequence 0: block_tables[0, 1] is 5, but the cache has 5 blocks"),
    (changed(tables=lambda c: without(c.tables, -1)), "sequence 0: block_tables[0, 1] is -1"),
    (changed(window=0), "window must be None or, with causal, positive, found 0"),
    (changed(window=3, causal=False), "window must be None or, with causal, positive, found 3 wit"),
    (changed(soft_cap=0.0), "soft_cap must be None or positive, found 0"),
    (changed(soft_cap=NAN), "soft_cap must be None or positive, found "),
]  # fmt: skip


@pytest.mark.parametrize(("make", "expected"), REFUSED, ids=[c[1][:50] for c in REFUSED])
def test_refusals(module: ModuleType, make: Callable[[], tuple[Any, ...]], expected: str) -> None:
    expected = expected or "out is written and must not share memory with query"
    for name in CALL_PATHS:
        arguments = make()
        before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        with pytest.raises(RuntimeError) as error:
            call_path(module, name, "paged_attention")(*arguments)
        assert str(error.value).startswith(f"paged_attention: {expected}")
        for argument, copy in zip(arguments, before, strict=True):
            if isinstance(copy, Tensor):
                torch.testing.assert_close(argument, copy, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": lambda c: c.query[0]}, "query must be"),
        ({"query": lambda c: c.query[:, :3]}, "3 query heads, 2 key heads"),
        ({"query": lambda c: c.query.half()}, "key_cache must be float16, as query is"),
        ({"key_cache": lambda c: c.key_cache[..., 1:]}, "key_cache must be"),
        ({"value_cache": lambda c: c.value_cache[1:]}, "value_cache must be"),
        ({"tables": lambda c: c.tables.long()}, "block_tables must be int32"),
        ({"lengths": ints(20)}, r"seq_lens must be int32, \(2,\)"),
        ({"starts": ints(0, 4)}, r"cu_seqlens_q must be int32, \(3,\)"),
        ({"window": 0}, "window=0 is not positive"),
        ({"window": 3, "causal": False}, "window needs causal=True"),
    ],
)
def test_errors_of_the_definition(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention.native(*changed(**changes)()[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_provider(module: ModuleType, dtype: torch.dtype) -> None:
    arguments = paged_attention.generate_inputs(num_tokens=9, dtype=dtype)
    wanted = paged_attention.native(*arguments)
    with paged_attention.set_priority(["opweave_c!"]):
        got = paged_attention(*arguments)
    tolerance = paged_attention.get_tolerance(dtype)
    torch.testing.assert_close(got, wanted, atol=tolerance.atol, rtol=tolerance.rtol)
    assert got.stride() == wanted.stride()


def test_selection(module: ModuleType) -> None:
    def chosen(**changes: Any) -> str:
        with paged_attention.set_priority(["opweave_c"]):
            return paged_attention.dispatch(*changed(**changes)()[1:]).provider

    assert chosen() == "opweave_c"
    assert chosen(window=3, soft_cap=1.0) == "opweave_c"
    assert chosen(key_cache=lambda c: torch.stack((c.key_cache,) * 2, 1)[:, 1]) == "opweave_c"
    assert chosen(key_cache=torch.zeros(5, 2, 8, 64), value_cache=torch.zeros(5, 2, 8, 64)) == (
        "native"
    )
    assert chosen(query=lambda c: c.query.double()) == "native"
    assert chosen(query=lambda c: c.query[:, :3]) == "native"
    assert chosen(tables=lambda c: c.tables.long()) == "native"
    assert chosen(soft_cap=-1.0) == "native"
    assert chosen(window=0) == "native"


def test_opcheck_and_graph(module: ModuleType) -> None:
    c = case([(1, 20), (3, 3)])
    torch.library.opcheck(torch.ops.opweave_c.paged_attention.default, (c.out(), *c.arguments()))

    rest = c.arguments()[1:]

    def attend(query: Tensor) -> Tensor:
        found: Tensor = provider.paged_attention(query + 0, *rest)
        return found

    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(c.query)
    assert torch.equal(got, attend(c.query))
    native = torch.compile(paged_attention.native, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(native(*c.arguments()), got, atol=2e-5, rtol=1e-4)


def fuzz(module: ModuleType, isas: tuple[str, ...], cases: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def size() -> int:
        return 32 * draw(1, 4) if draw(0, 3) else draw(1, 70)  # whole tiles, or any

    try:
        for number in range(cases):
            module._select_isa(isas[draw(0, len(isas) - 1)])
            most = 200 if draw(0, 9) == 0 else 50  # more than a tile of keys, or fewer
            sequences = [(draw(0, most // 4), draw(0, most)) for _ in range(draw(0, 3))]
            kv_heads, causal = draw(1, 3), draw(0, 3) > 0
            c = case(
                sequences,
                heads=(kv_heads * draw(1, 5), kv_heads),
                sizes=(size(), size()),
                block_size=16 * draw(1, 3),
                dtype=DTYPES[draw(0, 2)],
                extra=draw(0, 1),
                seed=number,
                scale=draw(0, 20) / 20,
                causal=causal,
                window=draw(1, 40) if causal and draw(0, 1) else None,
                soft_cap=draw(1, 50) / 10 if draw(0, 1) else None,
            )
            check(call_path(module, CALL_PATHS[draw(0, 1)], "paged_attention"), c)
    finally:
        module._select_isa(None)


def test_fuzz(module: ModuleType, isas: tuple[str, ...]) -> None:
    fuzz(module, isas, 250, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # two minutes, and more than five on a busy machine
def test_fuzz_at_length(module: ModuleType, isa: str) -> None:
    fuzz(module, (isa,), 10_000, seed=1)
