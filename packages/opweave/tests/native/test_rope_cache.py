"""Rotating into the paged cache is rotating, then writing: bit by bit, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from opweave import ir
from opweave.ir.ops.kv_cache import rope_reshape_and_cache

from .oracle import (
    CALL_PATHS,
    DTYPES,
    assert_rotated,
    assert_rotated_bits,
    call_path,
    rotated,
    using_threads,
)
from .rope_cases import Case, case, composed, projection, written

NAME = "rope_reshape_and_cache"
# tokens, query heads, kv heads, head size, rotated, value size, blocks, block size
SHAPES = [
    (7, 4, 2, 64, 64, 64, 4, 16),
    (1, 1, 1, 1, 0, 3, 1, 1),
    (0, 4, 2, 16, 16, 16, 4, 16),
    (40, 3, 3, 72, 20, 64, 5, 10),
    (5, 2, 0, 8, 8, 8, 2, 16),
    (9, 0, 2, 33, 30, 5, 2, 16),
    (70, 8, 2, 128, 126, 128, 3, 64),
]


def native(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The composition, native all the way down."""
    with ir.priority(rotary_embedding=["native"], reshape_and_cache=["native"]):
        found: tuple[Tensor, Tensor, Tensor] = rope_reshape_and_cache.native(*arguments)
    return found


def check_exact(c: Case, query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Against products of complex numbers, and a loop over the tokens."""
    rest = (c.positions, c.table, c.head_size, c.is_neox)
    assert_rotated(query, rotated(c.query, *rest))
    key = rotated(c.key, *rest).view(*c.value.shape[:2], c.head_size)
    assert_rotated(key_cache, written(key, c.key_cache.double(), c.slots))
    assert torch.equal(value_cache, written(c.value, c.value_cache, c.slots))


def check(run: Callable[..., None], c: Case, isa: str, *, in_place: bool = False) -> None:
    """Against the composition, bit by bit."""
    wanted = composed(c)
    mine = c.copy()
    out = mine.query if in_place else torch.full_like(c.query, 9)
    run(out, *mine.arguments())
    for got, expected in zip((out, mine.key_cache, mine.value_cache), wanted, strict=True):
        assert_rotated_bits(got, expected, isa)
    for given, kept in ((mine.key, c.key), (mine.value, c.value), (mine.slots, c.slots)):
        assert torch.equal(given, kept)
    assert in_place or torch.equal(mine.query, c.query)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALL_PATHS)
def test_values(module: ModuleType, isa: str, name: str, dtype: torch.dtype, is_neox: bool) -> None:
    run = call_path(module, name, NAME)
    for seed, shape in enumerate(SHAPES):
        c = case(
            *shape,
            dtype,
            seed,
            flat=seed % 2 == 0,
            is_neox=is_neox,
            table_dtype=torch.float32 if seed % 3 else dtype,
            index=torch.int32 if seed % 3 == 1 else torch.int64,
        )
        check(run, c, isa)
        check(run, c, isa, in_place=True)
        mine = c.copy()
        run(mine.query, *mine.arguments())
        check_exact(c, mine.query, mine.key_cache, mine.value_cache)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "heads"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_slices(module: ModuleType, isa: str, dtype: torch.dtype, flat: bool, tokens: int) -> None:
    for in_place in (True, False):
        qkv, c = projection(dtype, flat, tokens)
        before = qkv.clone()
        wanted = composed(c)
        out = c.query if in_place else torch.full((tokens, 5, 20), 9.0).to(dtype)[:, :4, :16]
        if not in_place and flat:
            out = torch.full((tokens, 70), 9.0).to(dtype)[:, 3:67]
        module.rope_reshape_and_cache(out, *c.arguments())
        for got, expected in zip((out, c.key_cache, c.value_cache), wanted, strict=True):
            assert_rotated_bits(got, expected, isa)
        assert torch.equal(qkv[:, 64:], before[:, 64:])
        assert in_place or torch.equal(qkv, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_does_not_depend_on_the_batch(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    c = case(300, 16, 4, 64, 64, 64, 20, 16, dtype, flat=False)
    whole = c.copy()
    with using_threads(2):
        module.rope_reshape_and_cache(whole.query, *whole.arguments())
    alone = c.copy()
    for i in range(300):
        rows = slice(i, i + 1)
        tokens = (alone.query[rows], alone.key[rows], alone.value[rows], alone.positions[rows])
        caches = (alone.key_cache, alone.value_cache, alone.slots[rows])
        module.rope_reshape_and_cache(tokens[0], *tokens, alone.table, *caches, 64, True)
    assert torch.equal(alone.query, whole.query)
    assert torch.equal(alone.key_cache, whole.key_cache)
    assert torch.equal(alone.value_cache, whole.value_cache)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_much_that_it_goes_past_the_caches(
    module: ModuleType, isa: str, dtype: torch.dtype
) -> None:
    c = case(4200, 2, 4, 128, 128, 192, 44, 96, dtype, flat=False)
    assert c.key.nbytes + c.value.nbytes > 2**23
    check(module.rope_reshape_and_cache, c, isa)


# Refusals


# The implementation


def test_provider_on_slices(module: ModuleType) -> None:
    for flat in (True, False):
        qkv, c = projection(torch.bfloat16, flat)
        before = qkv.clone()
        wanted = composed(c)
        with rope_reshape_and_cache.set_priority(["opweave_c!"]):
            donated = rope_reshape_and_cache.maybe_inplace(*c.arguments())
        assert torch.equal(qkv, before), "the queries are not copied to be rotated"
        assert donated[0].stride() == wanted[0].stride()
        assert donated[1].data_ptr() == c.key_cache.data_ptr()
        for got, expected in zip(donated, wanted, strict=True):
            assert torch.equal(got, expected)


def fuzz(module: ModuleType, isas: tuple[str, ...], cases: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    try:
        for number in range(cases):
            isa = isas[draw(0, len(isas) - 1)]
            module._select_isa(isa)
            dtype, head_size = DTYPES[draw(0, 2)], draw(1, 70)
            c = case(
                draw(0, 20),
                draw(0, 5),
                draw(1, 3),
                head_size,
                2 * draw(0, head_size // 2),
                draw(1, 40),
                draw(1, 4),
                draw(1, 20),
                dtype,
                number,
                flat=bool(draw(0, 1)),
                is_neox=bool(draw(0, 1)),
                table_dtype=torch.float32 if draw(0, 1) else dtype,
            )
            if draw(0, 1):  # rows with something between them
                wide = torch.nn.functional.pad(c.query, (draw(0, 3), draw(1, 3)), value=9.0)
                c = replace(c, query=wide[..., -c.query.shape[-1] - 1 : -1])
            run = call_path(module, CALL_PATHS[draw(0, 1)], NAME)
            check(run, c, isa, in_place=bool(draw(0, 1)))
    finally:
        module._select_isa(None)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_any_case(module: ModuleType, isas: tuple[str, ...], count: int) -> None:
    fuzz(module, isas, count, seed=0)
